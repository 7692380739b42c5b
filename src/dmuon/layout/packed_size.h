#pragma once

#include <algorithm>
#include <cstdint>

namespace dmuon::layout {

/// Every leaf begins at a multiple of so many elements of its packed buffer: 256 bytes of a 16-bit
/// dtype, so that kernels find aligned operands whatever the sizes of leaves before it.
inline constexpr std::int64_t kAlignedElements = 128;

/// What a leaf fills of a packed buffer.
inline std::int64_t packed_elements(std::int64_t num_elements) {
  return (num_elements + kAlignedElements - 1) / kAlignedElements * kAlignedElements;
}

/// On gloo a root sends to the members of a group of up to this size itself. A tree would be hardly
/// shorter.
inline constexpr int kMostDirect = 4;

// On gloo the members of a group send a packed buffer's segments straight to the members that sum
// them (wire/exchange.h): what comes in needs room beside the own segment.

/// The largest equal pieces in which a segment comes in: one from each peer fits into as much as
/// the buffer.
inline std::int64_t piece_elements(std::int64_t segment, std::int64_t buffer, int group_size) {
  const std::int64_t peers = group_size - 1;
  if (peers == 0 || segment <= buffer / peers) return segment;
  const std::int64_t room = std::max<std::int64_t>(buffer / peers, 1);
  const std::int64_t num_pieces = (segment + room - 1) / room;
  return (segment + num_pieces - 1) / num_pieces;
}

/// What a member of a group needs for its own segment of a buffer: never more than the buffer.
inline std::int64_t inbox_elements(std::int64_t segment, std::int64_t buffer, int group_size) {
  return (group_size - 1) * piece_elements(segment, buffer, group_size);
}

}  // namespace dmuon::layout
