"""Pictures of lanes over time, and the arithmetic of intervals behind their figures."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dmuon._planning.pictures import new_figure, require_format

LANES = {
    "compute": "compute",
    "update": "the update",
    "slices": "inside the slot",
    "intra": "inside the node",
    "inter": "between nodes",
}
COMMUNICATION = ("intra", "inter")
COMPUTE = ("forward", "recompute", "backward")
WAITS = ("await weights", "reshard", "finish route intra", "finish route inter")
PHASES = ("forward", "backward", "step", "between steps")

_COLORS = {
    "forward": "#a6cee3",
    "recompute": "#80b1d3",
    "backward": "#5b9bc8",
    "held up": "#7f7f7f",
    "adamw": "#b8b8b8",
    "host": "#d9d9d9",
    "optimizer step": "#b8b8b8",
    "finish update": "#8c564b",
    "prepare": "#dcc9ec",
    "gather": "#e7969c",
    "orthogonalise": "#8d6bb5",
    "scatter": "#ad494a",
    "apply": "#4a2c7a",
    "wait": "#e31a1c",
    "publish intra": "#fdbf6f",
    "publish inter": "#f0851b",
    "route intra": "#a5d99c",
    "route inter": "#33a02c",
}
_LABELS = {
    "held up": "other work on the device",
    "adamw": "AdamW",
    "host": "hooks and launches",
    "finish update": "compute waits for updates",
    "gather": "directions, inside the slot",
    "scatter": "updates, inside the slot",
    "wait": "compute waits",
    "publish intra": "weights, inside the node",
    "publish inter": "weights, between nodes",
    "route intra": "gradients, inside the node",
    "route inter": "gradients, between nodes",
}
_PHASE_SHADES = {"forward": "#f4f8fb", "backward": "#e3edf5", "step": "#f0f0f0", "between steps": "#ffffff"}
_INCHES = 14.0
_CHARACTER = 0.078  # inches of a label's character

_NO_UNIT = (
    *("optimizer step", "finish update", "prepare", "gather", "orthogonalise", "scatter", "apply"),
    *("held up", "adamw", "host"),
)

Interval = tuple[float, float]


def named(subject: tuple[str, int], units: Sequence[str]) -> str:
    """Returns the name of an operation's unit, or "batch 2"."""
    what, index = subject
    return units[index] if what == "unit" else f"batch {index}"


@dataclasses.dataclass(frozen=True)
class Bar:
    """An operation on a lane, in the unit of the picture's axis."""

    lane: str
    kind: str
    unit: str
    begin: float
    end: float


class TraceSpan(NamedTuple):
    """An operation in a trace. Times in microseconds."""

    lane: str
    kind: str
    unit: str
    issued: float
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Panel:
    """The lanes of one rank over the phases of a step."""

    title: str
    bars: Sequence[Bar]
    phases: Sequence[tuple[str, float, float]]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same points in disjoint intervals, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def common(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Returns the points in both."""
    left, right, overlaps = union(a), union(b), []
    i = j = 0
    while i < len(left) and j < len(right):
        overlaps.append((max(left[i][0], right[j][0]), min(left[i][1], right[j][1])))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return union(overlaps)


def without(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Returns the points of `a` that are not in `b`."""
    edges = [-math.inf, *(edge for interval in union(b) for edge in interval), math.inf]
    return common(a, zip(edges[::2], edges[1::2], strict=True))


def length(intervals: Iterable[Interval]) -> float:
    """Returns the length of all intervals together. Each point counts once."""
    return sum(end - begin for begin, end in union(intervals))


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Returns unit names without the path that all have in common: 'model.blocks.3' becomes '3'."""
    paths = {name: name.split(".") for name in names}
    levels = zip(*(path[:-1] for path in paths.values()), strict=False)
    depth = len(list(itertools.takewhile(lambda names: len(set(names)) == 1, levels)))
    return {name: ".".join(path[depth:]) for name, path in paths.items()}


def write_trace(path: str | os.PathLike[str], processes: Iterable[tuple[int, str, Iterable[TraceSpan]]]) -> None:
    """Writes a Chrome trace for https://ui.perfetto.dev: of each process its number, its name and its spans."""
    tids = {lane: tid for tid, lane in enumerate(LANES)}
    events: list[dict[str, Any]] = []
    for pid, name, spans in processes:
        named = {"ph": "M", "pid": pid}
        events.append({**named, "name": "process_name", "args": {"name": name}})
        for lane, tid in tids.items():
            events.append({**named, "tid": tid, "name": "thread_name", "args": {"name": LANES[lane]}})
        for span in spans:
            at = {"tid": tids[span.lane], "ts": span.begin, "dur": span.end - span.begin}
            words = {"name": f"{span.kind} {span.unit}".strip(), "cat": span.kind}
            events.append({"ph": "X", "pid": pid, **words, **at, "args": {"issued": span.issued, "unit": span.unit}})
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def draw(path: str | os.PathLike[str], panels: Sequence[Panel], title: str, axis: str, function: str) -> None:
    """Writes one picture with the lanes of each panel, one below the other.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: matplotlib does not write this format. Both name `function`.
    """
    require_format(path, function)
    # A mesh of one node has a lane less.
    lanes = [lane for lane in LANES if lane == "compute" or any(bar.lane == lane for p in panels for bar in p.bars)]
    figure = new_figure(function, figsize=(_INCHES, 1.4 + len(panels) * (0.25 + 0.36 * len(lanes))), dpi=150)
    patches = importlib.import_module("matplotlib.patches")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    end = max((bar.end for panel in panels for bar in panel.bars), default=1.0)
    names = short_names(bar.unit for panel in panels for bar in panel.bars if bar.kind not in _NO_UNIT)
    for area, panel in zip(axes, panels, strict=True):
        _draw_panel(area, panel, lanes, names, end)
    for name, begin, until in panels[0].phases:
        if (until - begin) / end > 0.03:
            axes[0].text((begin + until) / 2, -0.62, name, ha="center", va="bottom", fontsize=9, color="#444444")
    axes[-1].set_xlabel(axis)
    axes[-1].set_xlim(0, end)
    used = {_kind(bar) for panel in panels for bar in panel.bars}
    handles = [
        patches.Patch(facecolor=color, label=_LABELS.get(kind, kind)) for kind, color in _COLORS.items() if kind in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _kind(bar: Bar) -> str:
    return "wait" if bar.kind in WAITS else bar.kind


def _draw_panel(area: Any, panel: Panel, lanes: list[str], names: dict[str, str], end: float) -> None:
    for phase, begin, until in panel.phases:
        area.axvspan(begin, until, color=_PHASE_SHADES[phase], zorder=0, linewidth=0)
        area.axvline(begin, color="#999999", linewidth=0.6, linestyle=":", zorder=1)
    # An inner bar, such as a wait in a step, lies on top of the outer one.
    for bar in sorted(panel.bars, key=lambda bar: bar.begin - bar.end):
        row, kind, size = lanes.index(bar.lane), _kind(bar), bar.end - bar.begin
        area.barh(
            row,
            size,
            left=bar.begin,
            color=_COLORS.get(kind, "#dddddd"),
            edgecolor="white" if size > 0.004 * end else "none",
            linewidth=0.5,
            zorder=4 if kind == "wait" else 3,
        )
        label = names.get(bar.unit, bar.unit) or "step"
        if kind != "wait" and 0.85 * _INCHES * size / end > _CHARACTER * (len(label) + 0.5):
            area.text(bar.begin + size / 2, row, label, ha="center", va="center", fontsize=7, zorder=5, clip_on=True)
    area.set_yticks(range(len(lanes)), [LANES[lane] for lane in lanes], fontsize=8)
    area.set_ylim(len(lanes) - 0.45, -0.55)
    area.set_ylabel(panel.title, fontsize=9)
    area.tick_params(axis="y", length=0)
    for side in ("top", "right"):
        area.spines[side].set_visible(False)
