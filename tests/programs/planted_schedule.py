"""Bugs to plant in the schedule: what runs, what has been done already, in which order."""

from __future__ import annotations

from planted_change import Planted

RESOLVER = "src/dmuon/schedule/resolver.cpp"
RESOLVE = "src/dmuon/schedule/resolve.cpp"
ORDER = "src/dmuon/schedule/order.cpp"
PASS = "src/dmuon/schedule/pass_schedule.cpp"
STEP = "src/dmuon/schedule/step_schedule.cpp"
MAKER = "src/dmuon/schedule/maker.h"

# What step() resolves of its schedule.
_STEP = """\
  for (const Operation& operation : schedule_.step) {
    if (operation.kind == Kind::kReshard) {
      reshard(&units_.at(operation.unit()), operation);
    } else if (updates || !is_on_batch(operation.kind)) {
      resolve(operation);
    }
  }
"""

SCHEDULE = (
    Planted(
        "version_ignored",
        RESOLVE,
        "if (unit.stage_1 == version_) return;",
        "if (unit.stage_1 != kNone) return;",
        "A node copy counts as good for ever: after the first step other nodes compute with old weights.",
    ),
    Planted(
        "version_raised_late",
        RESOLVER,
        "  ++version_;\n" + _STEP,
        _STEP + "  ++version_;\n",
        "What step() itself sends is taken for sent: the next forward's first unit is old on other nodes.",
    ),
    Planted(
        "stage_1_not_repeated",
        RESOLVE,
        "  if (!options_.node_copy) unit->stage_1 = kNone;\n",
        "",
        "Without node copies the column's part of a freed buffer is not sent again: the next use reads what lay there.",
    ),
    Planted(
        "held_for_ever",
        RESOLVE,
        "unit.held = operation.hold;",
        "unit.held = unit.held || operation.hold;",
        "A synchronised route leaves the unit marked as holding partial sums: with FSDP2 over nodes, step() refuses.",
    ),
    Planted(
        "kept_unit_freed",
        RESOLVER,
        "  if (order_.on_demand() || order_.owes(trigger)) request(trigger);\n",
        "  request(trigger);\n",
        "A replay's end of the kept unit deviates: a rank that skips it does not, so ranks that may differ raise.",
    ),
    Planted(
        "evaluation_by_training_schedule",
        RESOLVE,
        "    case Pass::kEvalForward:\n      return schedule_.evaluation;\n",
        "    case Pass::kEvalForward:\n      return schedule_.forward;\n",
        "A replayed evaluation issues what training issues at that place: too few operations, or another unit's.",
    ),
    Planted(
        "deviation_keeps_trace",
        ORDER,
        "  if (known) {\n"
        "    deviated = true;  // begin() forgets the trace\n"
        "  } else {\n"
        "    triggers.push_back(trigger);\n"
        "  }\n",
        "  if (!known) triggers.push_back(trigger);\n",
        "A deviation ends no replay and no trace is made anew: ranks may differ where they must not, or the reverse.",
    ),
    Planted(
        "deviation_for_ever",
        ORDER,
        "  known = false;\n  deviated = false;\n",
        "  known = false;\n",
        "After one deviation every pass of its kind is compared: a rank that skips a block, as it may, raises.",
    ),
    Planted(
        "released_at_first_use",
        PASS,
        "    for (std::size_t i = trace_.size(); i-- > 0;) {\n",
        "    for (std::size_t i = 0; i < trace_.size(); ++i) {\n",
        "A shared unit is routed at its first release: each backward then deviates, and ranks that skip raise.",
    ),
    Planted(
        "freed_by_forwards_alone",
        PASS,
        "trace_[i].unit == trace_[last].unit && !uses_weights(trace_[i]);",
        "trace_[i].unit == trace_[last].unit && trace_[i].moment == Moment::kAfterForward;",
        "In the backward of a block used twice in a row the second publication finds the buffer full: reads it freed.",
    ),
    Planted(
        "first_unit_taken_for_kept",
        PASS,
        "  void publish_intra() {\n    for (std::size_t use = 0;",
        "  void publish_intra() {\n    for (std::size_t use = pass_ == Pass::kBackward ? 1 : 0;",
        "A second backward (of a retained graph) does not fill its first unit, and reads it freed.",
    ),
    Planted(
        "step_keeps_buffers",
        STEP,
        "    if (!layout.units[unit].empty()) operations.push_back(maker.reshard(unit));\n",
        "    static_cast<void>(unit);\n",
        "A unit that is still filled at step() (evaluated without reshard_after_forward) is used with old weights.",
    ),
    Planted(
        "finished_after_stage_1",
        MAKER,
        "{.kind = Kind::kFinishRouteInter, .subject = unit, .after = {{Kind::kRouteInter, unit}}}",
        "{.kind = Kind::kFinishRouteInter, .subject = unit, .after = {{Kind::kRouteIntra, unit}}}",
        "Stage 2 counts as over when stage 1 is: the node's mean and its inbox are freed while they are in use.",
    ),
    Planted(
        "stage_2_awaits_nothing",
        MAKER,
        "    return {.kind = Kind::kPublishIntra, .subject = unit, .after = {{Kind::kPublishInter, unit}}};\n",
        "    return {.kind = Kind::kPublishIntra, .subject = unit};\n",
        "Inside the node goes what lies in the node copy before stage 1 has come: old weights, or none.",
    ),
    Planted(
        "steps_do_not_wait_for_updates",
        MAKER,
        "{.kind = Kind::kFinishUpdate, .subject = batch, .after = {{Kind::kApply, batch}}}",
        "{.kind = Kind::kFinishUpdate, .subject = batch}",
        "step() returns while the update lane still reads gradients, which the program clears or adds to.",
    ),
)
