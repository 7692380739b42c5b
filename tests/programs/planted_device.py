"""Bugs to plant in what streams wait for: a CPU shows none of them, the asynchronous device must."""

from __future__ import annotations

from planted_change import Planted

LANE = "src/dmuon/wire/lane.cpp"
AUTOGRAD = "src/dmuon/engine/autograd.cpp"
BUFFER = "src/dmuon/wire/buffer.cpp"
ENGINE = "src/dmuon/engine/engine.cpp"
STEP = "src/dmuon/engine/step.cpp"
EXECUTOR_UPDATE = "src/dmuon/engine/executor_update.cpp"
EXECUTOR_H = "src/dmuon/engine/executor.h"
UNIT = "src/dmuon/engine/unit.cpp"
EXECUTOR = "src/dmuon/engine/executor.cpp"

# How a stream's lane runs an operation, and then says that it has happened (lane.cpp).
RUN = "      if (const Rest rest = operation.begin()) rest();\n"
RECORD = "      done.event->record(stream_);\n"

# Not here: the wait of a reshard, whose loss no program shows. It is for a unit that was sent ahead and is freed unused
# and unawaited; who takes its buffer next is mostly issued behind it, on the same lane.
DEVICE = (
    Planted(
        "lane_runs_ahead_of_compute",
        LANE,
        "    order(current, stream_);\n",
        "",
        "A lane sends gradients that are not yet computed, and fills a buffer that is still read.",
        on_device=True,
    ),
    Planted(
        "lanes_do_not_await_each_other",
        LANE,
        f"      for (const Event& event : after) event.wait();\n{RUN}{RECORD}",
        f"      static_cast<void>(after);\n{RUN}{RECORD}",
        "Stage 2 sends what stage 1 has not summed, and stage 2 of publishing copies what has not come.",
        on_device=True,
    ),
    Planted(
        "event_before_its_operation",
        LANE,
        RUN + RECORD,
        RECORD + RUN,
        "Whoever waits for an operation waits for the one before it.",
        on_device=True,
    ),
    Planted(
        "weights_used_before_they_came",
        EXECUTOR,
        "    case Kind::kAwaitWeights:\n      await(operation);\n",
        "    case Kind::kAwaitWeights:\n",
        "A module computes with weights that are on their way.",
        on_device=True,
    ),
    Planted(
        "one_stream_awaits_a_late_update",
        EXECUTOR_H,
        "  void await_update() const { update_awaited_.wait(); }\n",
        "  void await_update() const {}\n",
        "A stream changes gradients that an update reads, because another stream has waited for it.",
        on_device=True,
    ),
    Planted(
        "readers_do_not_await_a_late_update",
        ENGINE,
        "  resolver_.finish_update();\n  executor_.await_update();\n",
        "",
        "States, weights and norms are read while an update changes them.",
        on_device=True,
    ),
    Planted(
        "flag_of_a_late_update_freed_early",
        STEP,
        "  if (options_.step.late_updates) forget.release();\n",
        "",
        "Compute takes the memory of the flag that says if the step applies, before the lane has read it.",
        on_device=True,
    ),
    Planted(
        "weights_awaited_on_one_stream_alone",
        EXECUTOR_H,
        "{ states_.at(unit).weights_used.wait(); }",
        "{ static_cast<void>(unit); }",
        "A unit that was awaited on one stream is used, or freed, on another one without waiting.",
        on_device=True,
    ),
    Planted(
        "gradients_of_another_stream",
        UNIT,
        "  last_gradient_.wait();\n",
        "",
        "Where a model trains on another stream than Muon was made on, gradients travel before they are packed.",
        on_device=True,
    ),
    Planted(
        "blocks_without_a_stream",
        BUFFER,
        "  guard.recordDataPtrOnStream(data, guard.getStream(device_));\n",
        "",
        "A buffer that was given back on one stream is filled at once for another.",
        on_device=True,
    ),
    Planted(
        "leaving_on_its_own_stream",
        AUTOGRAD,
        "    on_producer.reset_stream(*producer->stream());\n",
        "",
        "Where two branches compute at once, autograd adds to a gradient in place that the other branch still reads.",
        on_device=True,
    ),
    Planted(
        "gradients_freed_while_they_travel",
        EXECUTOR,
        "      await(operation);\n      return wire::finish_route_intra(state.buffers.get());\n",
        "      return wire::finish_route_intra(state.buffers.get());\n",
        "A buffer goes to another unit while a lane still reads gradients from it.",
        on_device=True,
    ),
    Planted(
        "means_freed_while_they_travel",
        EXECUTOR,
        "      await(operation);\n      return wire::finish_route_inter(state.buffers.get());\n",
        "      return wire::finish_route_inter(state.buffers.get());\n",
        "A node's mean goes to another unit while a lane still sends it; step() takes what is not summed.",
        on_device=True,
    ),
    Planted(
        "device_does_not_wait_for_updates",
        EXECUTOR_UPDATE,
        "      awaited.done.wait();\n    } catch",
        "    } catch",
        "Compute changes gradients, or saves weights, while the update lane still works on them.",
        on_device=True,
    ),
    Planted(
        "norms_used_before_their_sum",
        EXECUTOR,
        "  done.wait();\n}",
        "}",
        "Clipping and skipping go by what one rank knows.",
        on_device=True,
    ),
    Planted(
        "norms_summed_before_the_node_has",
        EXECUTOR,
        "mesh_.column(), in_node);",
        "mesh_.column(), {});",
        "The column adds up while the row still does.",
        on_device=True,
    ),
)
