#pragma once

#include <algorithm>
#include <cstdint>

#include "dmuon/layout/packing.h"

namespace dmuon::wire {

/// Messages in which `size` elements come from each peer, so that one of each fits into `room`, at
/// least one element of each.
inline std::int64_t pieces_of(std::int64_t size, std::int64_t room, int num_peers) {
  if (size == 0) return 0;
  std::int64_t pieces = 1;
  while ((size + pieces - 1) / pieces * num_peers > std::max<std::int64_t>(room, num_peers))
    ++pieces;
  return pieces;
}

/// Messages in which all segments of a part come from each peer.
inline std::int64_t pieces_of(const layout::Part& part, std::int64_t room, int num_peers) {
  if (part.size() == 0) return 0;
  const std::int64_t pieces = pieces_of(part.size(), room, num_peers);
  const std::int64_t longest = (part.size() + pieces - 1) / pieces;
  std::int64_t messages = 0;
  for (const layout::Segment& segment : part.segments)
    messages += (segment.size() + longest - 1) / longest;
  return messages;
}

}  // namespace dmuon::wire
