"""Profiles: when every operation of a few steps ran, on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import weakref
from collections.abc import Iterator, Sequence

import torch.nn as nn

from dmuon._inspecting.recorder import Record, Recorder, Span
from dmuon._planning.timeline import (
    COMMUNICATION,
    COMPUTE,
    LANES,
    PHASES,
    WAITS,
    Bar,
    Interval,
    Panel,
    TraceSpan,
    common,
    draw,
    length,
    without,
    write_trace,
)
from dmuon._running.runtime import Runtime, runtime_of
from dmuon._setup.agreement import all_gather

# By what is hidden: its lanes, and the waits of compute that show it.
_HIDDEN = {"messages": (COMMUNICATION, WAITS), "updates": (("update",), (*WAITS, "finish update"))}


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Seconds a rank and step, by what was busy.

    The wire is the lane between nodes, on one node the lane inside it. It counts as busy while a message waits for a
    peer, or on its lane for an update. Compute is the units' modules, without waits.

    Attributes:
        both: the wire and compute.
        wire: the wire alone.
        compute: compute alone.
        neither: the rest, such as modules outside of units, FSDP2's own messages, and the optimizer's step.
    """

    both: float
    wire: float
    compute: float
    neither: float


class Profile:
    """The operations of all ranks while `dmuon.profile` was open. All ranks have the same after the context.

    Accelerators time operations by events on their streams.

    Attributes:
        spans: the operations of all ranks, in order of start.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._records: list[Record] = []
        self._mesh = ""

    def _fill(self, records: list[Record], runtime: Runtime) -> None:
        self._records = records
        self._mesh = f"{runtime.ranks.num_replicates} x {runtime.ranks.num_shards}"
        self.spans = sorted((span for record in records for span in record.spans), key=lambda span: span.started)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps that ended inside the context. A part after the last step does not count."""
        return min((len(record.steps) for record in self._records), default=0)

    def hidden(self, phase: str | None = None, of: str = "messages") -> float:
        """Returns the share of lanes' busy time, over all ranks, in which compute did not wait.

        NaN if no such lane was busy. Compute's waits in FSDP2 and in the step's agreement do not count.

        Args:
            phase: "forward", "backward", "step" or "between steps" to count that phase alone. None counts all.
            of: "messages" for the lanes of messages, where waits for updates do not count, or "updates" for the lane
                of updates, where all of dmuon's waits do.

        Raises:
            ValueError: `phase` or `of` is none of these.
        """
        _check_phase("hidden", phase)
        if of not in _HIDDEN:
            raise ValueError(f"profile.hidden: of: expected one of {tuple(_HIDDEN)}, got {of!r}")
        busy, waiting, _ = self._seconds(phase, of)
        return 1 - waiting / busy if busy > 0 else math.nan

    def overlap(self, phase: str | None = None) -> Overlap:
        """Returns how long the wire and compute were busy at once, each alone, and neither.

        Args:
            phase: "forward", "backward", "step" or "between steps" to count that phase alone. None counts all.

        Raises:
            ValueError: `phase` is none of these.
        """
        _check_phase("overlap", phase)
        lane = "inter" if any(span.lane == "inter" for span in self.spans) else "intra"
        both = wire = compute = total = 0.0
        for record in self._records:
            window = record.window(phase)
            sending = common(record.intervals(lambda span: span.lane == lane), window)
            computing = common(record.intervals(lambda span: span.kind in COMPUTE), window)
            computing = without(computing, record.intervals(lambda span: span.kind in (*WAITS, "finish update")))
            at_once = length(common(sending, computing))
            both += at_once
            wire += length(sending) - at_once
            compute += length(computing) - at_once
            total += length(window)
        rest = total - both - wire - compute
        return Overlap(*(seconds / self._num_shares for seconds in (both, wire, compute, rest)))

    @property
    def _num_shares(self) -> int:
        return max(1, len(self._records) * self.num_steps)

    def _seconds(self, phase: str | None, of: str = "messages") -> tuple[float, float, float]:
        """Returns three sums over the ranks: lanes busy; lanes busy while compute waited; all time."""
        lanes, waits = _HIDDEN[of]
        total = [0.0, 0.0, 0.0]
        for record in self._records:
            window = record.window(phase)
            busy = common(record.intervals(lambda span: span.lane in lanes), window)
            total[0] += length(busy)
            total[1] += length(common(record.intervals(lambda span: span.kind in waits), busy))
            total[2] += length(window)
        return total[0], total[1], total[2]

    def summary(self) -> str:
        """Returns three short tables with means over ranks and steps: what was hidden, overlaps, kinds of operations.

        With DMUON_CUDA_GRAPHS=1 also a line for each batch that says if a CUDA graph updates it, and if not, why.
        """
        shares = self._num_shares
        lines = [
            f"{self.num_steps} steps on {len(self._records)} ranks ({self._mesh}); ms a rank and step",
            f"{'':18} {'time':>8} {'lanes busy':>11} {'compute waits':>14} {'hidden':>8}",
        ]
        rows = [(phase or "all", phase, "messages") for phase in (*PHASES, None)]
        for name, phase, of in [*rows, ("all, the updates", None, "updates")]:
            busy, waiting, all_of_it = (1e3 * seconds / shares for seconds in self._seconds(phase, of))
            time = f"{all_of_it:8.2f}" if of == "messages" else ""
            hidden = "" if busy == 0 else f"{1 - waiting / busy:.0%}"
            lines.append(f"{name:18} {time:8} {busy:11.2f} {waiting:14.2f} {hidden:>8}")
        lines.append(f"{'busy':18} {'both':>8} {'wire alone':>11} {'compute alone':>14} {'neither':>8}")
        for phase in (*PHASES, None):
            both, wire, compute, neither = (1e3 * seconds for seconds in dataclasses.astuple(self.overlap(phase)))
            lines.append(f"{phase or 'all':18} {both:8.2f} {wire:11.2f} {compute:14.2f} {neither:8.2f}")
        lines.append(f"{'':18} {'lane':>8} {'a step':>11} {'ms a step':>14} {'longest':>8}")
        spans = [span for record in self._records for span in record.spans if span.started <= record.end]
        for lane in LANES:
            for kind in dict.fromkeys(span.kind for span in spans if span.lane == lane):
                times = [span.done - span.started for span in spans if (span.lane, span.kind) == (lane, kind)]
                lines.append(
                    f"{kind:18} {lane:>8} {len(times) / shares:11.1f} {1e3 * sum(times) / shares:14.2f} "
                    f"{1e3 * max(times):8.2f}"
                )
        for record in self._records:
            lines += [f"rank {record.rank}, {sentence}" for sentence in record.graphs]
        return "\n".join(lines)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes all ranks as one Chrome trace for https://ui.perfetto.dev. A process is a rank, a thread a lane."""
        origin = min((min(span.issued, span.started) for span in self.spans), default=0.0)

        def of(rank: int) -> Iterator[TraceSpan]:
            for span in self.spans:
                if span.rank == rank:
                    times = (1e6 * (t - origin) for t in (span.issued, span.started, span.done))
                    yield TraceSpan(span.lane, span.kind, span.unit, *times)

        write_trace(path, ((record.rank, f"rank {record.rank}", of(record.rank)) for record in self._records))

    def save_picture(
        self, path: str | os.PathLike[str], step: int = -1, only_ranks: Sequence[int] | None = None
    ) -> None:
        """Draws the operations of each lane in one step, and the waits of compute. Needs matplotlib.

        Args:
            path: the picture's file. Its ending says the format.
            step: the index of the optimizer step, -1 for the last.
            only_ranks: global ranks to draw. None means the first four.

        Raises:
            ValueError: there is no such step or rank, or matplotlib does not write this format.
            ImportError: matplotlib is missing.
        """
        if self.num_steps == 0:
            raise ValueError("profile.save_picture: expected a profile around one or more whole steps, got none")
        if not -self.num_steps <= step < self.num_steps:
            raise ValueError(f"profile.save_picture: step: expected one of {self.num_steps} steps, got {step}")
        known = [record.rank for record in self._records]
        wanted = known[:4] if only_ranks is None else list(only_ranks)
        if not wanted or not set(wanted) <= set(known):
            raise ValueError(f"profile.save_picture: only_ranks: expected some of {known}, got {wanted}")
        records = [record for record in self._records if record.rank in wanted]
        origin = min(record.steps[step][0] for record in records)

        def in_ms(record: Record, begin: float, end: float) -> Interval:
            low, high = record.steps[step]
            return 1e3 * (max(begin, low) - origin), 1e3 * (min(end, high) - origin)

        panels = []
        for record in records:
            bars = [Bar(s.lane, s.kind, s.unit, *in_ms(record, s.started, s.done)) for s in record.spans]
            phases = [(name, *in_ms(record, begin, end)) for name, begin, end in record.phases]
            inside = [bar for bar in bars if bar.end > bar.begin], [phase for phase in phases if phase[2] > phase[1]]
            panels.append(Panel(f"rank {record.rank}", *inside))
        title = f"step {range(self.num_steps)[step] + 1} of {self.num_steps}, mesh {self._mesh}"
        title += f"; over all steps {self.hidden():.0%} of the time of communication is hidden"
        axis = "ms; where compute is blank: everything else, such as FSDP2's own traffic, the head and the loss"
        draw(path, panels, title, axis, "profile.save_picture")


def _check_phase(method: str, phase: str | None) -> None:
    if phase is not None and phase not in PHASES:
        raise ValueError(f"profile.{method}: phase: expected one of {PHASES} or None, got {phase!r}")


_profiled: weakref.WeakSet[Runtime] = weakref.WeakSet()


@contextlib.contextmanager
def profile(model: nn.Module) -> Iterator[Profile]:
    """Records when each operation of the steps inside was issued, began and ended, on every rank.

    Collective over the mesh: every rank enters and exits at the same place, between steps. Entry and exit wait for
    messages in flight. The profile has its data once the context has ended without an error:

        with dmuon.profile(model) as profile:
            train(3)
        if rank == 0:
            print(profile.summary())
            profile.save_trace("trace.json")  # for https://ui.perfetto.dev
            profile.save_picture("step.png")

    A model's first step is traced and overlaps nothing, so profile a later one. Times of ranks on several hosts compare
    as well as the system clocks do. Modules compiled before show no forwards and backwards of their own.

    Raises:
        ValueError: the model has no `dmuon.Muon` yet, or another profile of it is open.
    """
    runtime = runtime_of(model, "profile")
    runtime.access.refuse_forked("profile()")
    if runtime in _profiled:
        raise ValueError("profile: model: expected one context at a time, got a nested one")
    found = Profile()
    runtime.engine.drain()
    _profiled.add(runtime)
    runtime.engine.profile().start()
    recorder = Recorder(runtime)
    try:
        yield found
        recorder.close()
        runtime.engine.drain()
    finally:
        recorder.close()
        operations = runtime.engine.profile().stop()
        _profiled.discard(runtime)
    runtime.engine.meet("profile")
    found._fill(all_gather(runtime.ranks, recorder.record(operations)), runtime)
