#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dmuon/engine/group.h"
#include "dmuon/engine/packing.h"

namespace dmuon::engine {

/// Takes a piece of a sum: its first element, counted in the own segment, and its fp32 values,
/// which it may change and which are gone afterwards.
using TakeSum = std::function<void(std::int64_t begin, at::Tensor values)>;

/// Elements of the inbox that reduce_segments needs at this member: never more than the buffer.
std::int64_t inbox_elements(const Group& group, const std::vector<Segment>& segments);

/// Sums every segment of a packed buffer over the group, segment g at member g alone.
///
/// Where the backend allows, each rank sends segment g straight to member g, which adds what comes
/// in order of rank in fp32: one message to each other member, (size - 1)/size of the buffer sent
/// and (size - 1) own segments received, the least that any algorithm sends. The same bits in every
/// run, whichever member sums. A
/// segment of which size - 1 do not fit into the inbox comes in as few equal pieces as do. (gloo's
/// own reduce sends 1.5 to 2.4 times the payload.) Elsewhere: the backend's reduce, one a segment,
/// in the wire's dtype; of fp16, which would overflow, the mean's terms.
///
/// @param packed    flat, allocated; segments other than this rank's are undefined afterwards.
/// @param segments  [group size], of `packed`.
/// @param inbox     [inbox_elements()] of `packed`'s dtype.
/// @param take      called with the pieces of the own segment in order; may write to `packed`.
/// @throws CommError naming `what`. Blocks the host on CPU backends.
void reduce_segments(Group& group, const at::Tensor& packed, const std::vector<Segment>& segments,
                     const at::Tensor& inbox, const TakeSum& take, const std::string& what);

}  // namespace dmuon::engine
