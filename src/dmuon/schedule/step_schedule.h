#pragma once

#include <cstdint>
#include <vector>

#include "dmuon/schedule/operation.h"
#include "dmuon/schedule/step_options.h"
#include "dmuon/schedule/trigger.h"

namespace dmuon::schedule {

/// What to issue when the i-th trigger of a pass is crossed.
using PassSchedule = std::vector<std::vector<Operation>>;

/// A whole optimizer step of one rank, and an evaluation.
struct StepSchedule {
  PassSchedule forward;
  PassSchedule evaluation;
  PassSchedule backward;
  PassSchedule backward_no_sync;  ///< of a micro-step whose gradients stay at the column members
  std::vector<Operation> step;    ///< the update, and publication in forward order

  /// Equal on all ranks whose schedules agree: kUpdate is a rank's own affair and left out.
  std::uint64_t hash() const;
};

/// What a pass issues (the paper, sec:design-schedule and sec:design-pipeline). Deterministic, and
/// the same on every rank. Stage 1 of a unit's weights is issued `lookahead` uses ahead, stage 2
/// one use ahead (without node copies a buffer travels through both stages, so both fill the same
/// window); in a backward the next weights go before this unit's gradients, and at most as many
/// routes are in flight as memory allows. A unit's gradients are freed after stage 1 of its route;
/// what stage 2 sends, the node's mean of one column, is freed after that. Routes that are in
/// flight at the end of a backward travel on; Resolver::finish_routes() ends them.
///
/// Memory: in a pass whose uses do not nest, packed weights, gradients, nodes' means and inboxes
/// (at most as large as what is in flight) fit in units_in_flight() times the largest unit's
/// weights and gradients, and four times the largest node's mean. Each use that is open while
/// another begins adds a unit; so does a unit that a forward kept, until it is freed, and in a
/// backward one that is used again later, whose gradients wait for its last use.
///
/// @param layout   at least the units that `trace` names.
/// @param trace    kBeforeUse ... kAfterForward or kAfterBackward of each use.
/// @param forward  `trace` itself; for a backward the training forward's trace, whose units have
///                 had stage 1 already.
/// @param sync     false: a backward under no_sync, which sends nothing between nodes.
/// @throws InvalidArgument for options out of range or a unit out of range.
PassSchedule build_pass_schedule(const Layout& layout, const Trace& trace, const Trace& forward,
                                 Pass pass, const StepOptions& options, bool sync = true);

/// What `step()` does: per unit in forward order, the updates that complete this rank's part of it,
/// then its stage 1, and stage 2 of the first; without node copies, of the first `lookahead` units
/// alone; then the remaining updates. With `lookahead` 0 the updates.
std::vector<Operation> build_update_schedule(const Layout& layout, const Trace& forward,
                                             const Batches& batches, const StepOptions& options);

/// All of a step. Passes without a trace are empty.
StepSchedule build_step_schedule(const Layout& layout, const Trace& forward,
                                 const Trace& evaluation, const Trace& backward,
                                 const Batches& batches, const StepOptions& options);

/// What a trigger issues where no trace is known: everything it needs, in order, and the wait for
/// it.
std::vector<Operation> serve_on_demand(const Layout& layout, Trigger trigger, bool sync = true);

}  // namespace dmuon::schedule
