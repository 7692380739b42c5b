#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "dmuon/layout/packing.h"
#include "dmuon/wire/group.h"

namespace dmuon::wire {

/// Takes a piece of a sum over a group.
/// @param begin   the first element of it, counted in the own part.
/// @param values  flat; the taker may change them, and they are gone afterwards.
/// @param scale   the mean is scale * values.
using TakeSum = std::function<void(std::int64_t begin, at::Tensor values, double scale)>;

/// A way in which the parts of a packed buffer travel between the members of a group, where part g
/// is member g's. There are two, because backends differ in what they do well; see
/// exchange_of.
///
/// Called on a lane, with all that it needs done before; alike on all members. Blocks the host on
/// CPU backends, the current stream elsewhere.
/// @throws CommError naming `what`.
class Exchange {
 public:
  virtual ~Exchange() = default;

  /// Every member gets every part, from the member whose it is.
  /// @param packed  flat; its own part holds values.
  void gather(Group& group, const at::Tensor& packed, const std::vector<layout::Part>& parts,
              const std::string& what) const;

  /// Elements of the inbox that reduce() needs at this member: never more than the buffer.
  virtual std::int64_t inbox_elements(const Group& group,
                                      const std::vector<layout::Part>& parts) const = 0;

  /// Every member gets the sum of its own part over all members.
  /// @param packed  flat; undefined afterwards.
  /// @param inbox   [inbox_elements()] of `packed`'s dtype.
  /// @param take    called with the pieces of the own part in order.
  virtual void reduce(Group& group, const at::Tensor& packed,
                      const std::vector<layout::Part>& parts, const at::Tensor& inbox,
                      const TakeSum& take, const std::string& what) const = 0;

 protected:
  /// One message for each segment of each member, together where the backend can; waits.
  static void for_segments(Group* group, const at::Tensor& packed,
                           const std::vector<layout::Part>& parts, const std::string& what,
                           const std::function<Pending(const at::Tensor& values, int root)>& issue);
};

/// Straight from member to member, for gloo on CPUs. Each rank sends part g to member g, which
/// adds what comes in order of rank in fp32: one message to each other member, (size - 1)/size of
/// the buffer sent and (size - 1) own parts received, the least that any algorithm sends. The
/// same bits in every run, whichever member sums. A part of which size - 1 do not fit into the
/// inbox comes in as few equal pieces as do. (gloo's own reduce sends 1.5 to 2.4 times the
/// payload.)
const Exchange& peer_exchange();

/// The backend's own collectives, one a segment, grouped into one launch where the backend can. It
/// sums in the wire's dtype; of fp16, which would overflow, the mean's terms. Its pieces are whole
/// segments, views of the packed buffer: as few kernels as can be.
const Exchange& backend_exchange();

/// The one that suits the group's backend; alike on all members.
inline const Exchange& exchange_of(const Group& group) {
  return group.free_point_to_point() ? peer_exchange() : backend_exchange();
}

}  // namespace dmuon::wire
