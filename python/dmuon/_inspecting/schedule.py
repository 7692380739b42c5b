"""The schedule of a step: its operations, their triggers, and a picture of its lanes."""

from __future__ import annotations

import dataclasses
import itertools
import os

import torch.nn as nn

from dmuon import _C
from dmuon._planning.timeline import COMMUNICATION, Bar, Panel, draw, named
from dmuon._running.runtime import Runtime, runtime_of
from dmuon._setup.dedication import dedication_of

_COMPUTE = ("forward", "backward")  # of modules, which no schedule holds
_UNTRACED = "nothing has been traced yet: run a training step (forward, backward, step), then ask again"


@dataclasses.dataclass(frozen=True)
class Message:
    """One collective. `root`, a member's index, sends weights to the others or receives gradients from each."""

    group: str  # "row": the ranks of this node; "column": the ranks of this shard index
    root: int
    bytes: int  # to, or from, each other member


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that a trigger issues.

    Attributes:
        trigger: the moment of issue: "before blocks.3", "after blocks.3", "opt.step()".
        lane: "compute", "update", "slices" (messages inside the slot), "intra" (inside the node) or "inter" (between).
        kind: such as "publish intra".
        unit: the unit's name, or "batch 2" for an operation on a batch.
        version: the version of the weights that it moves, counted from the version at the step's begin.
        after: (kind, unit) of operations that end before it starts, besides earlier ones of its lane.
        messages: the messages of this rank.
    """

    trigger: str
    lane: str
    kind: str
    unit: str
    version: int
    after: tuple[tuple[str, str], ...]
    messages: tuple[Message, ...]


@dataclasses.dataclass(frozen=True)
class StepSchedule:
    """The operations that this rank issues in a step like the previous one. Prints as a table.

    Attributes:
        forward: operations in order of issue, empty if no training forward has been traced.
        backward: likewise, of a backward.
        backward_no_sync: likewise, of a backward inside `dmuon.no_sync`.
        step: operations that `opt.step()` issues.
        mesh: the pair (R, G).
        slot: this rank's slot.
        node_copy: the option of `dedicate_params`.
    """

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    backward_no_sync: tuple[Operation, ...]
    step: tuple[Operation, ...]
    mesh: tuple[int, int]
    slot: int
    node_copy: bool
    _simulated: _Simulated | None = dataclasses.field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, object]:
        """Omits the simulation: another process can print and compare the copy, but not draw it."""
        return {**self.__dict__, "_simulated": None}

    @property
    def passes(self) -> dict[str, tuple[Operation, ...]]:
        """Returns the parts of a step without no_sync, in order."""
        return {"forward": self.forward, "backward": self.backward, "step": self.step}

    def sent_bytes(self, operation: Operation) -> int:
        """Returns the bytes that this rank sends for an operation. A broadcast counts once, as in `opt.stats()`."""
        place = {"row": self.slot % self.mesh[1], "column": self.slot // self.mesh[1]}
        publishes = operation.kind.startswith("publish")
        return sum(m.bytes for m in operation.messages if (m.root == place[m.group]) == publishes)

    def __str__(self) -> str:
        """Returns the table of a step."""
        if not self.forward:
            return _UNTRACED
        lines = [
            f"schedule of slot {self.slot} of mesh {self.mesh[0]} x {self.mesh[1]}, in a step like the one before; v0: "
            "the weights that the step began with",
            _row("when", "lane", "operation", "unit", "v", "bytes sent", "messages", "not before"),
        ]
        for name, operations in self.passes.items():
            lines.append(f"{name}:")
            own = [operation for operation in operations if operation.kind not in _COMPUTE]
            for trigger, issued in itertools.groupby(own, lambda operation: operation.trigger):
                first, *others = issued
                lines += [self._line(first, trigger), *(self._line(operation, "") for operation in others)]
        return "\n".join(lines)

    def _line(self, operation: Operation, trigger: str) -> str:
        word = "from" if operation.kind.startswith("publish") else "to"
        messages = ", ".join(f"{word} {m.root}: {_bytes(m.bytes)}" for m in operation.messages)
        if messages:
            messages = f"{operation.messages[0].group}, {messages}"
        after = ", ".join(kind if unit == operation.unit else f"{kind} {unit}" for kind, unit in operation.after)
        return _row(
            trigger,
            operation.lane,
            operation.kind,
            operation.unit,
            str(operation.version),
            _bytes(self.sent_bytes(operation)) if operation.lane in COMMUNICATION else "",
            messages,
            after,
        )

    def save_picture(self, path: str | os.PathLike[str], intra: float = 0.8, inter: float = 0.8) -> None:
        """Draws the lanes in a step whose neighbours are equal. Needs matplotlib.

        This is a model, not a measurement; `dmuon.profile` measures. All ranks run in virtual time. A unit's forward
        takes 1, its backward 2, a batch's update 0.5, and a message takes a time in proportion to its bytes.

        Args:
            path: the picture's file. Its ending says the format.
            intra: duration of the largest operation inside the node, in forwards of a unit.
            inter: likewise, between nodes.

        Raises:
            ValueError: no forward or backward has been traced, or the schedule comes from another process.
            ImportError: matplotlib is missing.
        """
        if not self.forward or not self.backward:
            raise ValueError(f"schedule.save_picture: {_UNTRACED}")
        if self._simulated is None:
            raise ValueError(
                "schedule.save_picture: expected what dmuon.schedule returned, got a copy from another process"
            )
        panel = self._simulated.panel(self, intra, inter)
        title = f"the schedule of slot {self.slot} of mesh {self.mesh[0]} x {self.mesh[1]}, modelled"
        draw(path, [panel], title, "forwards of a unit", "schedule.save_picture")


def _row(*cells: str) -> str:
    widths = (26, 8, 14, 16, 2, 11, 44)
    return "  ".join([*(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=False)), cells[-1]]).rstrip()


def _bytes(count: int) -> str:
    if count < 10_000:
        return f"{count} B"
    return f"{count / 1e3:.1f} kB" if count < 1e7 else f"{count / 1e6:.1f} MB"


# Three equal steps and a micro-step. The first step is traced, and the last one is drawn.
_STEP = [_C.TrainingEvent.TRAIN_FORWARD, _C.TrainingEvent.BACKWARD, _C.TrainingEvent.STEP]
_NUM_STEPS = 3
_EVENTS = [*_STEP * _NUM_STEPS, _C.TrainingEvent.TRAIN_FORWARD, _C.TrainingEvent.BACKWARD_NO_SYNC]
_FIRST = len(_STEP) * (_NUM_STEPS - 1)
_NO_SYNC = len(_EVENTS) - 1


class _Simulated:
    """The model's steps on all ranks, as the C++ resolver issues them and the C++ simulator runs them."""

    def __init__(self, model: nn.Module, runtime: Runtime) -> None:
        dedication, engine, ranks = dedication_of(model, "schedule"), runtime.engine, runtime.ranks
        unit_of = {
            parameter: index
            for index, unit in enumerate(runtime.units)
            for leaf in unit.leaves
            for parameter in runtime.parts[leaf]
        }
        batches = [
            [[unit_of[parameter] for parameter in parameters] for parameters in of_slot]
            for of_slot in runtime.plan.native.batches_by_slot
        ]
        self.slot, self.owner, self.layout = ranks.slot, ranks.owner, engine.layout()
        self.names = [unit.label for unit in runtime.units]
        job = _C.Job(
            self.layout,
            dedication.schedule,
            engine.trace(_C.Pass.TRAIN_FORWARD),
            engine.trace(_C.Pass.BACKWARD),
            batches,
            _EVENTS,
        )
        self.programs = _C.unroll(job)
        self.issues = self.programs[ranks.owner].issues

    def operations(self, event: int, known: bool) -> tuple[Operation, ...]:
        """Returns the operations of an event, none unless its pass is `known`."""
        if not known:
            return ()
        return tuple(self._operation(issue) for issue in self.issues if issue.event == event)

    def _operation(self, issue: _C.Issue) -> Operation:
        operation, trigger = issue.operation, "opt.step()"
        computes = issue.kind in _COMPUTE
        if issue.trigger is not None:
            word = "before" if issue.trigger.moment == _C.Moment.BEFORE_USE else "after"
            trigger = f"{word} {self.names[issue.trigger.unit]}"
        return Operation(
            trigger,
            issue.lane,
            issue.kind,
            self._named(operation.subject),
            operation.version,
            tuple((dependency.kind, self._named(dependency.subject)) for dependency in operation.after),
            () if computes else self._messages(operation),
        )

    def _messages(self, operation: _C.Operation) -> tuple[Message, ...]:
        return tuple(Message(m.group, m.root, m.bytes) for m in _C.messages_of(operation, self.layout, self.slot))

    def _named(self, subject: tuple[str, int]) -> str:
        return named(subject, self.names)

    def panel(self, schedule: StepSchedule, intra: float, inter: float) -> Panel:
        """Returns this rank's lanes in the step, with these durations of the largest operations of two lanes."""
        totals = [(o.lane, sum(m.bytes for m in o.messages)) for ops in schedule.passes.values() for o in ops]
        largest = {lane: max((size for at, size in totals if at == lane), default=0) or 1 for lane in COMMUNICATION}
        spans = _C.execute(
            self.programs,
            forward=1.0,
            backward=2.0,
            prepare=0.05,
            orthogonalise=0.4,
            apply=0.05,
            row_byte=intra / largest["intra"],
            column_byte=inter / largest["inter"],
        )[self.owner]
        ends = [0.0] * len(_EVENTS)  # times at which the program has issued and computed all of an event
        for span in spans:
            issue = self.issues[span.issue]
            computes = issue.lane == "compute"
            ends[issue.event] = max(ends[issue.event], span.end_us if computes else span.issued_us)
        ends = list(itertools.accumulate(ends, max))  # an event without operations takes no time
        begin, end = ends[_FIRST - 1], ends[_FIRST + 2]
        bars = []
        for span in spans:
            issue = self.issues[span.issue]
            shown = max(span.start_us, begin) - begin, min(span.end_us, end) - begin
            if shown[0] < shown[1]:
                bars.append(Bar(issue.lane, issue.kind, self._named(issue.operation.subject), *shown))
        times = [at - begin for at in ends[_FIRST - 1 : _FIRST + 3]]
        return Panel("", bars, list(zip(schedule.passes, times, times[1:], strict=False)))


def schedule(model: nn.Module) -> StepSchedule:
    """Returns this rank's operations in a step: trigger, lane, kind, unit, messages, version and dependencies.

    Not collective. Passes that have not been traced, such as those of a first step, are empty.

    Raises:
        ValueError: the model has no `dmuon.Muon` yet.
    """
    runtime = runtime_of(model, "schedule")
    engine = runtime.engine
    simulated = _Simulated(model, runtime)
    forward, backward = (bool(engine.trace(of)) for of in (_C.Pass.TRAIN_FORWARD, _C.Pass.BACKWARD))
    return StepSchedule(
        forward=simulated.operations(_FIRST, forward),
        backward=simulated.operations(_FIRST + 1, backward),
        backward_no_sync=simulated.operations(_NO_SYNC, backward),
        step=simulated.operations(_FIRST + 2, forward),
        mesh=(runtime.ranks.num_replicates, runtime.ranks.num_shards),
        slot=runtime.ranks.slot,
        node_copy=dedication_of(model, "schedule").schedule.node_copy,
        _simulated=simulated,
    )
