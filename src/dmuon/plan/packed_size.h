#pragma once

#include <algorithm>
#include <cstdint>

namespace dmuon::plan {

// On gloo the members of a group send a packed buffer's segments straight to the members that sum
// them (engine/exchange.h): what comes in needs room beside the own segment.

/// The largest equal pieces in which a segment comes in: one from each peer fits into as much as
/// the buffer.
inline std::int64_t piece_elements(std::int64_t segment, std::int64_t buffer, int group_size) {
  const std::int64_t peers = group_size - 1;
  if (segment * peers <= buffer) return segment;
  const std::int64_t room = std::max<std::int64_t>(buffer / peers, 1);
  const std::int64_t num_pieces = (segment + room - 1) / room;
  return (segment + num_pieces - 1) / num_pieces;
}

/// What a member of a group needs for its own segment of a buffer: never more than the buffer.
inline std::int64_t inbox_elements(std::int64_t segment, std::int64_t buffer, int group_size) {
  return (group_size - 1) * piece_elements(segment, buffer, group_size);
}

}  // namespace dmuon::plan
