#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "dmuon/engine/buffer.h"
#include "dmuon/engine/group.h"
#include "dmuon/engine/packing.h"

namespace dmuon::engine {

/// The sum of this rank's segment over a group.
struct SegmentSum {
  at::Tensor values;  ///< [own segment]; fp32 or the wire's dtype
  std::unique_ptr<PackedBuffer>
      storage;  ///< keeps `values` alive, unless they lie in the wire buffer
};

/// Sums every segment of a packed buffer over the group, segment g at member g alone.
///
/// Where the backend allows, each rank sends segment g straight to member g, which adds what comes
/// in ring order in fp32: one message to each other member, (size - 1)/size of the buffer sent and
/// (size - 1) own segments received, the least that any algorithm sends; bitwise reproducible.
/// Incoming segments wait in an inbox no larger than the buffer itself, so a segment that is the
/// whole buffer is received one peer at a time. (gloo's own reduce sends 1.5 to 2.4 times the
/// payload.) Elsewhere: the backend's reduce, one a segment, in the wire's dtype.
///
/// @param packed    flat, allocated; segments other than this rank's are undefined afterwards.
/// @param segments  [group size], of `packed`.
/// @throws CommError naming `what`. Blocks the host on CPU backends.
SegmentSum reduce_segments(Group& group, const at::Tensor& packed,
                           const std::vector<Segment>& segments,
                           const std::shared_ptr<BufferPool>& pool, const std::string& what);

}  // namespace dmuon::engine
