"""Reports a training run's contenders: a table, three figures, JSON."""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from rich.table import Table

from bench.contender import LABELS, StepTimes
from bench.interleave import Ratio, paired_ratio

COLORS = {"adamw": "#7f7f7f", "muon_ag": "#d62728", "dmuon": "#1f77b4"}
TABLE_WIDTH = 112  # columns; narrower, figures would be cut
PARTS = ("forward", "backward", "optimizer")


@dataclass
class Record:
    """One contender's run; times are seconds, means over the ranks, without each block's first step."""

    name: str
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    blocks: list[list[StepTimes]] = field(default_factory=list)
    peak_bytes: int | None = None

    def median_ms(self, part: str) -> float:
        seconds: list[float] = [getattr(times, part) for block in self.blocks for times in block]
        return 1e3 * statistics.median(seconds)

    def block_seconds(self) -> list[float]:
        return [statistics.fmean(times.step for times in block) for block in self.blocks]

    def seconds(self) -> list[float]:
        """Training time at each validation, from the end of the warm-up, without the validations.

        A block's first step, which is not timed, counts as the mean of the others.
        """
        times = zip(self.block_seconds(), self.blocks, strict=True)
        return list(itertools.accumulate(mean * (len(block) + 1) for mean, block in times))

    def ratio_to(self, base: Record) -> Ratio:
        return paired_ratio(self.block_seconds(), base.block_seconds())

    @property
    def train_loss(self) -> float:
        """Mean of the last twentieth of the steps: single batches are noisy."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 20) :])


def table(records: dict[str, Record], title: str) -> Table:
    """Returns a table with one row a contender; AdamW's time is the unit."""
    out = Table(title=title, caption="times: median ms; x AdamW: median of paired blocks with its 95 % interval")
    out.add_column("optimizer", no_wrap=True)
    for heading in ("step", *PARTS, "x AdamW", "train loss", "val. loss", "peak MB"):
        out.add_column(heading, justify="right", no_wrap=True)
    for name, record in records.items():
        base = records.get("adamw")
        out.add_row(
            LABELS[name],
            *(f"{record.median_ms(part):.1f}" for part in ("step", *PARTS)),
            str(record.ratio_to(base)) if base and base is not record else "",
            f"{record.train_loss:.4f}",
            f"{record.validation[-1][1]:.4f}",
            "n/a" if record.peak_bytes is None else f"{record.peak_bytes / 1e6:.0f}",
        )
    return out


def write(records: dict[str, Record], facts: dict[str, Any], out: Path) -> None:
    """loss.png, loss_by_time.svg, step_time.png and results.json into `out`."""
    _draw_loss(records, out / "loss.png")
    _draw_loss_by_time(records, f"{facts['title']}, measured on {facts['machine']}", out / "loss_by_time.svg")
    _draw_step_time(records, out / "step_time.png")
    contenders = {}
    for name, record in records.items():
        summary: dict[str, Any] = {f"{part}_ms": record.median_ms(part) for part in ("step", *PARTS)}
        if "adamw" in records:
            summary["ratio_to_adamw"] = asdict(record.ratio_to(records["adamw"]))
        summary |= {
            "train_loss": record.train_loss,
            "validation_loss": record.validation[-1][1],
            "peak_bytes": record.peak_bytes,
            "losses": record.losses,
            "validation": record.validation,
            "seconds": record.seconds(),
        }
        contenders[name] = summary
    (out / "results.json").write_text(json.dumps({**facts, "optimizers": contenders}, indent=1) + "\n")


def _draw_loss(records: dict[str, Record], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, record in records.items():
        axis.plot(record.losses, color=COLORS[name], alpha=0.25, linewidth=0.8)
        steps, losses = zip(*record.validation, strict=True)
        # Muon-AG and dmuon compute the same update: dashes keep both curves visible.
        style = "--" if name == "dmuon" else "-"
        axis.plot(steps, losses, style, color=COLORS[name], marker="o", markersize=3, label=LABELS[name])
    axis.set(xlabel="step", ylabel="loss, nats a byte", title="Validation (dots) and training (faint) loss")
    axis.set_ylim(top=min(4.0, axis.get_ylim()[1]))
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_loss_by_time(records: dict[str, Record], title: str, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, record in records.items():
        losses = [loss for _, loss in record.validation]
        axis.plot(record.seconds(), losses, color=COLORS[name], marker="o", markersize=3, label=LABELS[name])
    axis.set(xlabel="seconds of training after the warm-up", ylabel="validation loss, nats a byte")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _draw_step_time(records: dict[str, Record], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 0.9 + 0.7 * len(records)), layout="constrained")
    labels = [LABELS[name] for name in records]
    left = [0.0] * len(records)
    for part, shade in zip(PARTS, ("#9ecae1", "#4292c6", "#e6550d"), strict=True):
        widths = [record.median_ms(part) for record in records.values()]
        axis.barh(labels, widths, left=left, color=shade, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set(xlabel="ms a step", title="Where a training step goes (medians)")
    axis.legend(loc="best")
    figure.savefig(path, dpi=150)
    plt.close(figure)
