#pragma once

#include <cstdint>
#include <vector>

#include "dmuon/schedule/operation.h"
#include "dmuon/schedule/step_options.h"
#include "dmuon/schedule/trigger.h"

namespace dmuon::schedule {

class Maker;

/// [i] the operations to issue when the i-th trigger of a pass is crossed.
using PassSchedule = std::vector<std::vector<Operation>>;

/// Holds the operations of a whole optimizer step of one rank, and of an evaluation.
struct StepSchedule {
  PassSchedule forward;
  PassSchedule evaluation;
  PassSchedule backward;
  PassSchedule backward_no_sync;  ///< of a micro-step whose gradients stay at the column members
  std::vector<Operation> step;    ///< the update, and publication in forward order

  /// Equal on all ranks whose schedules agree. Leaves out what is a rank's own: batches, and what
  /// operations wait for.
  std::uint64_t hash() const;
};

/// Builds the operations of a pass (the paper, sec:design-schedule and sec:design-pipeline).
/// Deterministic, and equal on every rank but for the batches that publications wait for.
///
/// - Stage 1 of a unit's weights is issued `lookahead` uses ahead, stage 2 one use ahead. Without
///   node copies both stages fill the packed buffer, so both share one window.
/// - In a backward the next weights go before this unit's gradients. Memory limits the routes in
///   flight: as many nodes' means travel as fit, column by column, beside the rest.
/// - A unit's gradients are freed after stage 1 of its route, the node's mean after stage 2.
/// - Routes in flight at the end of a backward stay so until Resolver::finish_routes().
///
/// Memory, in a pass whose uses do not nest: units_in_flight() times the largest unit's weights and
/// gradients, and four times the largest node's mean, inboxes included. One more unit is held for
/// each use that is open while another begins, for a unit that a forward kept, and in a backward
/// for a unit that is used again later.
///
/// @param layout   at least the units that the traces name.
/// @param trace    kBeforeUse ... kAfterForward or kAfterBackward of each use.
/// @param forward  `trace` itself; for a backward the training forward's trace, whose units have
///                 had stage 1 already.
/// @param sync     false: a backward under no_sync, which sends nothing between nodes.
PassSchedule build_pass_schedule(const Layout& layout, const Batches& batches, const Trace& trace,
                                 const Trace& forward, Pass pass, const StepOptions& options,
                                 bool sync = true);

/// The operations of `step()`:
///
/// 1. Free what is left of the old weights.
/// 2. Update all batches, in the order in which the next forward needs their units.
/// 3. For each unit in forward order: wait for the batches that complete this rank's part; send
///    stage 1, and stage 2 of the first unit. Without node copies for the first `lookahead` units
///    alone; with `lookahead` 0 for none. Of replicated weights send both stages of all units.
/// 4. Wait for the other batches.
///
/// With StepOptions::late_updates compute waits for no batch here; Resolver::finish_update() does.
/// A publication itself waits for its unit's batches. Else it is issued after compute has waited,
/// so that a rank whose update fails has not come to it: its peers find out that they wait in vain.
std::vector<Operation> build_update_schedule(const Layout& layout, const Batches& batches,
                                             const Trace& forward, const StepOptions& options);

/// All of a step. Passes without a trace are empty.
/// @throws InvalidArgument for options out of range, or a unit that the layout lacks.
StepSchedule build_step_schedule(const Layout& layout, const Batches& batches, const Trace& forward,
                                 const Trace& evaluation, const Trace& backward,
                                 const StepOptions& options);

/// The operations of a trigger where no trace is known: everything it needs, in order, and the wait
/// for it.
/// @param maker  of the layout.
std::vector<Operation> serve_on_demand(const Layout& layout, const Maker& maker, Trigger trigger,
                                       bool sync = true);

}  // namespace dmuon::schedule
