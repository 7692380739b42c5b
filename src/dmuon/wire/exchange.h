#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dmuon/layout/packing.h"
#include "dmuon/wire/group.h"
#include "dmuon/wire/lane.h"

namespace dmuon::wire {

/// Consumes a piece of a sum over a group.
/// @param begin   its first element, counted in the own part.
/// @param values  flat; may be changed, and are invalid after the call.
/// @param scale   the mean is scale * values.
using TakeSum = std::function<void(std::int64_t begin, at::Tensor values, double scale)>;

/// Moves the parts of a packed buffer between the members of a group. Part g belongs to member g.
///
///   const Exchange& exchange = exchange_of(group);
///   const Rest rest = exchange.gather(group, packed, parts, "the weights of 'a'");
///   rest();
///
/// There are two, because backends have different strengths.
/// All members make the same calls, on a lane, after everything that the call needs. A call issues
/// messages; its rest, which is never empty, waits for them. Tensors and the group outlive the
/// rest. Both block the host on CPU backends, the current stream elsewhere. Rests of a group's
/// exchanges run in the order of the calls.
/// @throws CommError naming `what`, from the call or from its rest.
class Exchange {
 public:
  virtual ~Exchange() = default;

  /// Sends every part from its member to all others.
  /// @param packed  flat; the own part holds values.
  virtual Rest gather(Group& group, const at::Tensor& packed,
                      const std::vector<layout::Part>& parts, const std::string& what) const;

  /// Returns the elements of the inbox that reduce() needs at this member: at most the buffer's.
  virtual std::int64_t inbox_elements(const Group& group,
                                      const std::vector<layout::Part>& parts) const = 0;

  /// Sums each part over all members, at the part's member.
  /// @param packed  flat; undefined afterwards.
  /// @param inbox   [inbox_elements()] of `packed`'s dtype.
  /// @param take    called in the rest, with the pieces of the own part in order.
  virtual Rest reduce(Group& group, const at::Tensor& packed,
                      const std::vector<layout::Part>& parts, const at::Tensor& inbox, TakeSum take,
                      const std::string& what) const = 0;

 protected:
  /// Issues one message for each segment of each member, grouped if the backend can.
  static std::vector<Pending> for_segments(
      Group* group, const at::Tensor& packed, const std::vector<layout::Part>& parts,
      const std::string& what,
      const std::function<Pending(const at::Tensor& values, int root)>& issue);
};

/// Sends straight from member to member, for gloo on CPUs. Each rank sends part g to member g,
/// which adds the terms in order of rank in fp32. So the bits are the same in every run, whichever
/// member sums.
///
/// A rank sends one message to each other member, (size - 1)/size of the buffer, and receives
/// (size - 1) own parts. No algorithm sends less; gloo's own reduce sends 1.5 to 2.4 times the
/// payload. If size - 1 terms of a part do not fit into the inbox, the part comes in as few equal
/// pieces as fit; the rest receives each after it has taken the one before.
const Exchange& peer_exchange();

/// Uses the backend's own collectives: an all-gather and a reduce-scatter if the parts are equal
/// (layout::equal_parts); else one a segment, grouped into one launch if the backend can. Sums in
/// the dtype of the messages. An fp16 sum would overflow, so fp16 values are divided before the
/// sum. Pieces are whole segments, views of the packed buffer: this needs the fewest kernels.
const Exchange& backend_exchange();

/// Returns the exchange that suits the group's backend: the same one on all members.
inline const Exchange& exchange_of(const Group& group) {
  return group.free_point_to_point() ? peer_exchange() : backend_exchange();
}

}  // namespace dmuon::wire
