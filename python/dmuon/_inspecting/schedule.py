"""What a step issues, when, and how its lanes would run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence

import torch.nn as nn

from dmuon import _C
from dmuon._inspecting.timeline import WAITS, Bar, Panel, draw
from dmuon._running.runtime import Runtime, runtime_of
from dmuon._setup.dedication import dedication_of

_UNTRACED = "nothing has been traced yet: run a training step (forward, backward, step), then ask again"
_COMPUTE = {"forward": 1.0, "backward": 2.0, "update": 0.5}  # in a picture, in units of a forward


@dataclasses.dataclass(frozen=True)
class Message:
    """One collective: `root` (a member's index) sends weights to the others, or receives gradients from each."""

    group: str  # "row": the ranks of this node; "column": of this shard index
    root: int
    bytes: int  # to or from each other member


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a trigger issues.

    Attributes:
        trigger: what has come to pass: "before blocks.3", "after blocks.3", "end", "opt.step()".
        lane: "compute", "intra" (messages inside the node) or "inter" (between nodes).
        kind: such as "publish intra".
        unit: its name; of an update, "batch 2".
        version: of the weights that it moves, counted from those that the step began with.
        after: (kind, unit) of those that end before it starts, beside earlier ones of its lane.
        messages: that this rank takes part in.
        idle: in steady state there is nothing left to do for it.
    """

    trigger: str
    lane: str
    kind: str
    unit: str
    version: int
    after: tuple[tuple[str, str], ...]
    messages: tuple[Message, ...]
    idle: bool = False


@dataclasses.dataclass(frozen=True)
class StepSchedule:
    """What this rank issues in a step whose passes have been traced; `print` it.

    Attributes:
        forward: in order of issue; empty where no training forward has been traced.
        backward: likewise.
        backward_no_sync: in place of `backward`, inside `dmuon.no_sync`.
        step: what `opt.step()` issues.
        mesh: (R, G).
        slot: of this rank.
        node_copy: as given to `dedicate_params`.
    """

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    backward_no_sync: tuple[Operation, ...]
    step: tuple[Operation, ...]
    mesh: tuple[int, int]
    slot: int
    node_copy: bool

    @property
    def passes(self) -> dict[str, tuple[Operation, ...]]:
        """The parts of a step without no_sync, in order."""
        return {"forward": self.forward, "backward": self.backward, "step": self.step}

    def sent_bytes(self, operation: Operation) -> int:
        """What this rank sends for an operation, as `opt.stats()` counts: a broadcast once, at its root."""
        if operation.idle:
            return 0
        place = {"row": self.slot % self.mesh[1], "column": self.slot // self.mesh[1]}
        publishes = operation.kind.startswith("publish")
        return sum(m.bytes for m in operation.messages if (m.root == place[m.group]) == publishes)

    def __str__(self) -> str:
        """The table of a step."""
        if not self.forward:
            return _UNTRACED
        lines = [
            f"schedule of slot {self.slot} of mesh {self.mesh[0]} x {self.mesh[1]}; v0: the weights that the step "
            "began with; (idle): done already in a step like the one before",
            _row("when", "lane", "operation", "unit", "v", "bytes sent", "messages", "not before"),
        ]
        for name, operations in self.passes.items():
            lines.append(f"{name}:")
            before = ""
            for operation in operations:
                if operation.kind in ("forward", "backward"):
                    continue  # the module's own compute
                lines.append(self._line(operation, "" if operation.trigger == before else operation.trigger))
                before = operation.trigger
        return "\n".join(lines)

    def _line(self, operation: Operation, trigger: str) -> str:
        word = "from" if operation.kind.startswith("publish") else "to"
        messages = ", ".join(f"{word} {m.root}: {_bytes(m.bytes)}" for m in operation.messages)
        if messages:
            messages = f"{operation.messages[0].group}, {messages}"
        after = ", ".join(kind if unit == operation.unit else f"{kind} {unit}" for kind, unit in operation.after)
        moves = operation.lane != "compute"
        return _row(
            trigger,
            operation.lane,
            operation.kind,
            operation.unit,
            str(operation.version),
            ("(idle)" if operation.idle else _bytes(self.sent_bytes(operation))) if moves else "",
            messages,
            after,
        )

    def save_picture(self, path: str | os.PathLike[str], intra: float = 0.8, inter: float = 0.8) -> None:
        """Draws how the lanes would run a step like the ones before and after it. Needs matplotlib.

        A model, not a measurement (see `dmuon.profile`): every unit's forward takes 1, its backward 2, every batch's
        update 0.5, a message as long as its bytes say, and no rank waits for another.

        Args:
            path: of the picture; its ending says the format.
            intra: how long the largest operation inside the node takes, in forwards of a unit.
            inter: likewise between nodes.

        Raises:
            ValueError: no forward and backward have been traced.
            ImportError: matplotlib is missing.
        """
        if not self.forward or not self.backward:
            raise ValueError(f"schedule.save_picture: {_UNTRACED}")
        panel = _simulated(self, {"intra": intra, "inter": inter})
        title = f"the schedule of slot {self.slot} of mesh {self.mesh[0]} x {self.mesh[1]}, modelled"
        draw(path, [panel], title, "forwards of a unit", "schedule.save_picture")


def _row(*cells: str) -> str:
    widths = (26, 8, 14, 16, 2, 11, 44)
    return "  ".join([*(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=False)), cells[-1]]).rstrip()


def _bytes(count: int) -> str:
    if count < 10_000:
        return f"{count} B"
    return f"{count / 1e3:.1f} kB" if count < 1e7 else f"{count / 1e6:.1f} MB"


def _active(operations: Sequence[Operation], node_copy: bool, fresh: set[str], filled: set[str]) -> Iterator[bool]:
    """Whether each has something to do, given the units whose stages 1 and 2 were issued; both sets are kept up."""
    for operation in operations:
        unit, kind = operation.unit, operation.kind
        done = {"publish inter": fresh, "publish intra": filled}.get(kind)
        yield done is None or unit not in done
        if done is not None:
            done.add(unit)
        if kind == "reshard":
            filled.discard(unit)
            if not node_copy:
                fresh.discard(unit)


def _with_idle(schedule: StepSchedule) -> StepSchedule:
    fresh: set[str] = set()
    filled: set[str] = set()
    marked: dict[str, tuple[Operation, ...]] = {}
    for _ in range(2):  # the first round brings the sets to where a step leaves them
        for name, operations in schedule.passes.items():
            if name == "step":
                fresh.clear()  # the weights change
            active = _active(operations, schedule.node_copy, fresh, filled)
            marked[name] = tuple(
                dataclasses.replace(operation, idle=not is_active)
                for operation, is_active in zip(operations, active, strict=True)
            )
    return dataclasses.replace(schedule, forward=marked["forward"], backward=marked["backward"], step=marked["step"])


def _simulated(schedule: StepSchedule, largest: dict[str, float]) -> Panel:
    """Lanes as queues; the second of two equal steps, so that what the first sent ahead is there."""
    totals = [(o.lane, sum(m.bytes for m in o.messages)) for ops in schedule.passes.values() for o in ops]
    scale = {lane: time / max([size for at, size in totals if at == lane] + [1]) for lane, time in largest.items()}
    now, begin = 0.0, 0.0
    free = dict.fromkeys(scale, 0.0)
    done: dict[tuple[str, str], float] = {}
    bars: list[Bar] = []
    phases: list[tuple[str, float, float]] = []
    for _ in range(2):
        begin = now
        phases.clear()
        for name, operations in schedule.passes.items():
            entered = now
            for operation in operations:
                if operation.idle:
                    continue
                ready = max([now, *(done.get(key, 0.0) for key in operation.after)])
                if operation.lane != "compute":
                    start = max(ready, free[operation.lane])
                    end = start + scale[operation.lane] * sum(m.bytes for m in operation.messages)
                    free[operation.lane] = done[operation.kind, operation.unit] = end
                else:
                    start, end = now, ready if operation.kind in WAITS else now + _COMPUTE[operation.kind]
                    now = end
                bars.append(Bar(operation.lane, operation.kind, operation.unit, start, end))
            phases.append((name, entered - begin, now - begin))
    shown = [
        dataclasses.replace(bar, begin=max(bar.begin, begin) - begin, end=min(bar.end, now) - begin)
        for bar in bars
        if bar.end > begin and bar.begin < min(bar.end, now)
    ]
    return Panel("", shown, phases)


def schedule(model: nn.Module) -> StepSchedule:
    """What a step of this rank issues: per trigger the lane, operation, unit, messages, version and dependencies.

    Not collective. Of passes that have not been traced (in a first step, say) nothing is known.

    Raises:
        ValueError: the model has no `dmuon.Muon` yet.
    """
    runtime = runtime_of(model, "schedule")
    engine = runtime.engine
    native = engine.schedule()
    forward = _operations(runtime, native.forward, engine.trace(_C.Pass.TRAIN_FORWARD))
    backward_trace = engine.trace(_C.Pass.BACKWARD)
    found = StepSchedule(
        forward=forward,
        backward=_operations(runtime, native.backward, backward_trace),
        backward_no_sync=_operations(runtime, native.backward_no_sync, backward_trace),
        step=tuple(_operation(runtime, "opt.step()", operation) for operation in native.step) if forward else (),
        mesh=(runtime.ranks.num_replicates, runtime.ranks.num_shards),
        slot=runtime.ranks.slot,
        node_copy=dedication_of(model, "schedule").schedule.node_copy,
    )
    return _with_idle(found)


def _operations(
    runtime: Runtime, native: Sequence[Sequence[_C.Operation]], triggers: Sequence[_C.Trigger]
) -> tuple[Operation, ...]:
    words = {_C.Moment.BEFORE_USE: "before", _C.Moment.AFTER_FORWARD: "after", _C.Moment.AFTER_BACKWARD: "after"}
    if len(triggers) != len(native):
        return ()  # ranks have deviated from it: it is traced anew
    backward = any(trigger.moment == _C.Moment.AFTER_BACKWARD for trigger in triggers)
    found = []
    for trigger, operations in zip(triggers, native, strict=True):
        unit = _unit(runtime, trigger.unit)
        text = f"{words[trigger.moment]} {unit}"
        if trigger.moment == _C.Moment.AFTER_BACKWARD:
            found.append(Operation(text, "compute", "backward", unit, 0, (), ()))
        found += [_operation(runtime, text, operation) for operation in operations]
        if trigger.moment == _C.Moment.BEFORE_USE and not backward:
            found.append(Operation(text, "compute", "forward", unit, 0, (), ()))
    return tuple(found)


def _unit(runtime: Runtime, index: int) -> str:
    return runtime.units[index].name or "(root)"


def _operation(runtime: Runtime, trigger: str, operation: _C.Operation) -> Operation:
    messages = runtime.engine.messages_of(operation, runtime.ranks.slot)
    return Operation(
        trigger,
        operation.lane,
        operation.kind,
        f"batch {operation.batch}" if operation.kind == "update" else _unit(runtime, operation.unit),
        operation.version,
        tuple((dependency.kind, _unit(runtime, dependency.unit)) for dependency in operation.after),
        tuple(Message(message.group, message.root, message.bytes) for message in messages),
    )
