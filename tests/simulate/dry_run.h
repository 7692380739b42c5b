#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dmuon/simulate/execution.h"

namespace dmuon::simulate {

/// Drawn times.
struct Delays {
  std::uint32_t seed = 0;
  double compute_us = 50;  ///< mean; each operation takes between nothing and twice that
  double message_us = 20;  ///< likewise
  bool rendezvous = false;
};

struct DryRun {
  std::vector<std::string> violations;  ///< sentences; empty: the programs are sound
  core::Vector<core::Owner, std::vector<SimulatedSpan>> timeline;
  std::int64_t peak_bytes = 0;  ///< the largest of any rank, as granted_bytes() counts
};

/// The bytes that weights, gradients, nodes' means and inboxes of a rank may take at most:
/// (open + units_in_flight - 1) * (largest weights + largest gradients), and between nodes four
/// times the largest node's mean, where `open` is the largest number of units in use at once. A
/// unit that a forward keeps is in use until it is freed; in a backward, a unit is in use from its
/// first use to the end of its last, when its gradients leave; what a step sends ahead is in use
/// until a pass uses it. Without a reshard after the forward, or where a pass deviates, there is no
/// such bound: the largest integer.
std::int64_t granted_bytes(const Job& job);

/// Runs the programs of all ranks of a mesh against the contract of schedule::Operation and says
/// what is unsound about them:
///
/// - Order: all ranks issue the same operations of communication in the same order, so there is one
///   total order over the messages of all groups; the k-th messages of a group's members agree in
///   operation, unit, root and bytes. All ranks compare the same triggers at the same places, leave
///   to the host framework at the same places, and have the same hash at the end.
/// - Progress: no operation waits for one that is issued later, or never; no rank stays blocked.
/// - Buffers: see analyze(), which needs no luck.
/// - Data: what kForward and kBackward read is all of the version that they should, what is
///   published is of the version that it claims, and every owner updates with the gradients of all
///   ranks, each once.
/// - Memory: no rank takes more than `granted_bytes`.
///
/// One run stands for all delays: what operations find depends on delays only where two use a
/// buffer in no certain order, and that is reported.
///
/// @param node_copy, granted_bytes  as the programs were built.
DryRun dry_run(const Programs& programs, bool node_copy, std::int64_t granted_bytes,
               const Delays& delays);

/// unroll() and then the above.
DryRun dry_run(const Job& job, const Delays& delays);

}  // namespace dmuon::simulate
