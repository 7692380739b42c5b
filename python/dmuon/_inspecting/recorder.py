"""Hooks that record when modules compute while a profile is open, and the record of one rank."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dmuon import _C
from dmuon._planning.timeline import Interval, named
from dmuon._running.muon import Muon
from dmuon._running.runtime import Runtime
from dmuon._running.structures import computed_tensors


@dataclasses.dataclass(frozen=True)
class Span:
    """One operation as its device ran it. Times are seconds of the host's clock.

    Attributes:
        rank: the global rank.
        lane: "compute", "update", "slices" (messages inside the slot), "intra" (inside the node) or "inter" (between).
        kind: an operation of the engine, as `dmuon.schedule` names it; or "forward", "recompute", "backward",
            "optimizer step".
        unit: the unit's name, "" for "optimizer step".
        issued: time when the operation entered its lane's queue.
        started: time when its dependencies and what came before it in the queue had ended.
        done: time when it ended.
    """

    rank: int
    lane: str
    kind: str
    unit: str
    issued: float
    started: float
    done: float


@dataclasses.dataclass
class Record:
    """The record of one rank."""

    rank: int
    spans: list[Span]
    phases: list[tuple[str, float, float]]  # in order of time
    steps: list[Interval]  # each ends with its optimizer step
    graphs: list[str] = dataclasses.field(default_factory=list)  # a sentence for each batch, with DMUON_CUDA_GRAPHS=1

    @property
    def end(self) -> float:
        """The end of the last step; without one all times count."""
        return self.steps[-1][1] if self.steps else math.inf

    def window(self, phase: str | None) -> list[Interval]:
        """Returns the times of a phase up to the last step. None means all phases."""
        return [(begin, end) for name, begin, end in self.phases if phase in (None, name) and end <= self.end]

    def intervals(self, wanted: Callable[[Span], bool]) -> list[Interval]:
        """Returns the times of the operations that are `wanted`."""
        return [(span.started, span.done) for span in self.spans if wanted(span)]


class Recorder:
    """Hooks while a profile is open. They record when modules compute, and the phases of steps."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._names = [unit.label for unit in runtime.units]
        self._clock = runtime.engine.profile().clock()
        self._now = self._clock.now
        self._open = True
        self._began = self._ended = self._now()
        self._marks = [(self._began, "between steps")]
        self._steps: list[_C.Instant] = []
        self._spans: list[tuple[str, str, _C.Instant, _C.Instant]] = []  # kind, unit, begin, end
        self._running: list[tuple[int, str, _C.Instant]] = []  # unit, kind, begin
        self._gradients: list[list[_C.Instant]] = [[] for _ in runtime.units]  # begins of each unit's backwards
        self._handles: list[Any] = [
            runtime.model.register_forward_pre_hook(self._mark_forward, prepend=True),
            runtime.model.register_forward_hook(self._watch(None)),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for index, unit in enumerate(runtime.units):
            if not unit.leaves:
                continue
            # The inner hooks run next to the module, because waits of dmuon and FSDP2 are not its compute.
            for module in (*unit.modules, *runtime.reader_modules[index]):
                self._handles += [
                    module.register_forward_pre_hook(self._mark_forward, prepend=True),
                    module.register_forward_pre_hook(self._begin(index)),
                    module.register_forward_hook(self._end(index), prepend=True, always_call=True),
                    module.register_forward_hook(self._watch(index)),
                ]

    def close(self) -> None:
        """Ends the last phase and removes the hooks."""
        if self._open:
            self._ended = self._now()
        self._open = False
        for handle in self._handles:
            handle.remove()

    def _mark(self, phase: str) -> None:
        if self._open and self._marks[-1][1] != phase:
            self._marks.append((self._now(), phase))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _mark_forward(self, *_: Any) -> None:
        if not _C.in_backward():
            self._mark("forward")

    def _begin(self, index: int) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def begin(*_: Any) -> None:
            self._running.append((index, "recompute" if _C.in_backward() else "forward", self._now()))

        return begin

    def _end(self, index: int) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def end(*_: Any) -> None:
            # Runs without a begin if an earlier hook has raised.
            if self._running and self._running[-1][0] == index:
                _index, kind, begin = self._running.pop()
                self._spans.append((kind, self._names[index], begin, self._now()))

        return end

    def _watch(self, index: int | None) -> Any:
        def began(gradient: torch.Tensor) -> None:
            self._mark("backward")
            if self._open and index is not None:
                self._gradients[index].append(self._now())

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def watch(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                for tensor in computed_tensors(output):
                    tensor.register_hook(began)

        return watch

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not isinstance(optimizer, Muon) or optimizer._runtime is not self._runtime:
            return None
        self._mark("step")
        of_step = inspect.signature(type(optimizer).step).bind(*args, **kwargs)
        if (closure := of_step.arguments.get("closure")) is not None:
            of_step.arguments["closure"] = self._before_rest_of_step(closure)
        return of_step.args, of_step.kwargs

    def _before_rest_of_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns the closure, after whose forward and backward the step goes on."""

        def marked() -> Any:
            loss = closure()
            self._mark("step")
            return loss

        return marked

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if isinstance(optimizer, Muon) and optimizer._runtime is self._runtime:
            begin = self._marks[-1][0]
            self._mark("between steps")
            self._steps.append(self._marks[-1][0])
            self._spans.append(("optimizer step", "", begin, self._steps[-1]))

    def record(self, operations: list[_C.Span]) -> Record:
        """Returns the record, with the engine's operations. Waits until all of them have ended."""
        seconds = self._clock.seconds
        timed = [(kind, unit, seconds(begin), seconds(end)) for kind, unit, begin, end in self._spans]
        rank = self._runtime.ranks.here
        spans = [
            Span(rank, o.lane, o.kind, named(o.subject, self._names), o.issued, o.started, o.done) for o in operations
        ]
        for index, instants in enumerate(self._gradients):
            starts = [seconds(instant) for instant in instants]
            own = [o for o in operations if o.subject == ("unit", index)]
            awaited = [o.done for o in own if o.kind == "await weights"]
            releases = sorted(o.started for o in own if o.kind == "reshard")
            for begin, end in _pair(starts, releases):
                # Python's hooks on a tensor run before the engine's hook, which waits for the weights.
                begin = max([begin, *(time for time in awaited if begin < time <= end)])
                timed.append(("backward", self._names[index], begin, end))
        spans += [Span(rank, "compute", kind, unit, begin, begin, end) for kind, unit, begin, end in timed]
        spans.sort(key=lambda span: span.started)
        times = [*(seconds(begin) for begin, _ in self._marks), seconds(self._ended)]
        names = [phase for _, phase in self._marks]
        phases = list(zip(names, times, times[1:], strict=False))
        steps = [seconds(end) for end in self._steps]
        graphs = self._runtime.graphs.reports() if self._runtime.graphs is not None else []
        return Record(rank, spans, phases, list(zip([times[0], *steps], steps, strict=False)), graphs)


def _pair(starts: list[float], ends: list[float]) -> list[Interval]:
    """Returns an interval for each end, from the first start after the previous end: a use ends with its release."""
    pairs, last_end = [], -math.inf
    for end in ends:
        since = [start for start in starts if last_end < start <= end]
        if since:
            pairs.append((min(since), end))
        last_end = end
    return pairs
