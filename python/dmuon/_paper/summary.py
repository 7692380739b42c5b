"""Counts how good the predictions are, and compares them with guesses that need no profile."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from dmuon._paper.prediction import FITTED, Figure, Prediction


class Count(NamedTuple):
    """The number of figures whose error is within a limit."""

    words: str
    limit: float  # percent
    within: int
    of: int
    worst: float  # error, percent
    worst_row: str


class Mean(NamedTuple):
    """A figure over all 24 rows: computed from the table, and from the predictions."""

    words: str
    table: float
    predicted: float


class Summary(NamedTuple):
    """All counts and means, by name."""

    counts: dict[str, Count]
    means: dict[str, Mean]


def summarise(rows: list[Prediction]) -> Summary:
    """Summarises predictions of all rows."""
    return Summary(_counts(rows), _means(rows))


def _counts(rows: list[Prediction]) -> dict[str, Count]:
    public = [one for one in rows if one.is_public]
    middle = [one for one in public if not one.is_end]
    alone = [(one, Figure(one.row.adamw_step, one.row.dmuon_step, FITTED)) for one in rows]
    return {
        "dmuon_optim": _count("DMuon optimizer, public models, fitted", 15, ((p, p.dmuon_optim) for p in public)),
        "dmuon_optim_held_out": _count(
            "DMuon optimizer, 12 rows held out, constants from 8 and 256 GPUs",
            15,
            ((p, p.dmuon_optim_of_ends) for p in middle),
        ),
        "vanilla_optim_held_out": _count(
            "vanilla optimizer, 12 rows held out", 5, ((p, p.vanilla_optim) for p in middle)
        ),
        "vanilla_step_held_out": _count(
            "vanilla step, 12 rows held out, AdamW's step given", 5, ((p, p.vanilla_step) for p in middle)
        ),
        "dmuon_step": _count(
            "DMuon step, public models, fitted, AdamW's step given", 5, ((p, p.dmuon_step) for p in public)
        ),
        "dmuon_step_all": _count(
            "DMuon step, all models, fitted, AdamW's step given", 5, ((p, p.dmuon_step) for p in rows)
        ),
        "adamw_as_dmuon_5": _count('"DMuon step = AdamW step", no profile, all models', 5, alone),
        "adamw_as_dmuon_15": _count('"DMuon step = AdamW step", no profile, all models', 15, alone),
    }


def _count(words: str, limit: float, figures: Iterable[tuple[Prediction, Figure]]) -> Count:
    found = list(figures)
    worst, error = max(((one.row, figure.error) for one, figure in found), key=lambda pair: abs(pair[1]))
    within = sum(abs(figure.error) <= limit for _, figure in found)
    return Count(words, limit, within, len(found), error, f"{worst.model} at {worst.gpus}")


def _means(rows: list[Prediction]) -> dict[str, Mean]:
    table = [one.row.overhead for one in rows]
    profile = [one.overhead for one in rows]
    steps = [one.row.step_speedup for one in rows], [one.step_speedup for one in rows]
    optims = [one.row.optim_speedup for one in rows], [one.optim_speedup for one in rows]
    return {
        "overhead_mean": Mean("overhead over AdamW, mean, %", statistics.mean(table), statistics.mean(profile)),
        "overhead_median": Mean("overhead over AdamW, median, %", statistics.median(table), statistics.median(profile)),
        "step_speedup_mean": Mean("step speedup over Muon-AG, mean", *map(statistics.mean, steps)),
        "step_speedup_least": Mean("step speedup over Muon-AG, least", *map(min, steps)),
        "step_speedup_most": Mean("step speedup over Muon-AG, most", *map(max, steps)),
        "optim_speedup_least": Mean("optimizer speedup over Muon-AG, least", *map(min, optims)),
        "optim_speedup_most": Mean("optimizer speedup over Muon-AG, most", *map(max, optims)),
    }


def overhead_errors(rows: list[Prediction]) -> dict[str, float]:
    """Returns mean absolute errors of three predictions of the overhead, in points of percent."""
    table = [one.row.overhead for one in rows]
    mean = statistics.mean(table)
    return {
        "profile": statistics.mean(abs(one.overhead - one.row.overhead) for one in rows),
        "mean of the table": statistics.mean(abs(mean - one) for one in table),
        "no overhead": statistics.mean(map(abs, table)),
    }
