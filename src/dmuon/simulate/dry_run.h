#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dmuon/simulate/program.h"

namespace dmuon::simulate {

/// How long things take where nothing is drawn.
struct Costs {
  double forward_us = 0;  ///< of a unit
  double backward_us = 0;
  double update_us = 0;  ///< of a batch
  double row_us_per_byte = 0;
  double column_us_per_byte = 0;
};

/// How long things take, in virtual time.
struct Delays {
  std::uint32_t seed = 0;
  double compute_us = 50;  ///< mean; each operation takes between nothing and twice that
  double message_us = 20;  ///< likewise
  /// A collective ends nowhere before it has begun at all members. Else a broadcast ends where its
  /// root has begun it, and a reduction at its root when all have begun it.
  bool rendezvous = false;
  std::optional<Costs> costs{};  ///< in place of what is drawn
};

/// One operation on its lane, in virtual time.
struct Span {
  int issue;  ///< index in the rank's program
  schedule::Lane lane;
  double issued_us;
  double start_us;  ///< when it had waited for all that it must wait for
  double end_us;
};

struct DryRun {
  std::vector<std::string> violations;  ///< sentences; empty: the programs are sound
  core::Vector<core::Slot, std::vector<Span>> timeline;  ///< in the order of completion
  std::int64_t peak_bytes = 0;  ///< the largest of any rank, as granted_bytes() counts
};

/// Runs the programs of all ranks of a mesh against the contract of schedule::Operation and says
/// what is unsound about them:
///
/// - Order: all ranks issue the same operations of communication in the same order, so there is one
///   total order over the messages of all groups; the k-th messages of a group's members agree in
///   operation, unit, root and bytes. All ranks compare the same triggers at the same places, and
///   have the same hash at the end.
/// - Progress: no operation waits for one that is issued later, or never; no rank stays blocked.
/// - Buffers: see analyze(), which needs no luck.
/// - Data: what kForward and kBackward read is all of the version that they should, what is
///   published is of the version that it claims, and every owner updates with the gradients of all
///   ranks, each once.
/// - Memory: no rank takes more than `granted_bytes`.
///
/// One run stands for all delays: lanes are queues and messages are matched by their place, so
/// which operations run, and what they find, depends on delays only where two operations use a
/// buffer in no certain order (Kahn 1974), and that is reported. Only the timeline differs.
///
/// @param programs  at least one; layouts may differ, meshes may not.
/// @param node_copy, granted_bytes  as the programs were built.
DryRun dry_run(const Programs& programs, bool node_copy, std::int64_t granted_bytes,
               const Delays& delays);

/// unroll() and then the above.
DryRun dry_run(const Job& job, const Delays& delays);

}  // namespace dmuon::simulate
