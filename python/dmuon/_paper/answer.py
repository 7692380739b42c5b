"""Everything that is said of the paper's table: rows, summary, breakdown and owners; and the same as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from dmuon._paper.ablation import Ablation, ablate
from dmuon._paper.owners import STRATEGIES, Owners, compare_owners
from dmuon._paper.prediction import Figure, Prediction, predictions
from dmuon._paper.profile import ENDS_ONLY, ORIGINS, PAPER, Profile
from dmuon._paper.summary import Summary, overhead_errors, summarise
from dmuon._paper.table import ABLATION, HEADLINES, SOURCE, misprints
from dmuon._paper.workload import WALL_WM_FITS, WORKLOADS

_CLOSE = 15.0  # percent
NOTES = [
    "DMuon's optimizer time: matrix_ms, element_ms and fixed_ms are fitted to the same 18 rows that are then counted, "
    "by that count. Plain least squares on these rows would count 15: Qwen2.5-7B at 8 GPUs would be 15.3 % off.",
    "Vanilla: four constants and tensor_ms are fitted to the six 8- and 256-GPU rows of public models. The 12 rows "
    "between are held out.",
    "Every predicted step contains the table's AdamW step of the same row, which the profile does not predict. So "
    "steps are an easy test; the overhead is the hard one.",
    "On public models the profile predicts the overhead of a row hardly better than the mean of all overheads does.",
    "vanilla_network_ms is hardly determined by its six rows: fitted to all 18 it is 14 times as large.",
    "Fused qkv and gate-up of Pi0 are inferred from the same table. Rates of products are measured (A800), not fitted.",
    WALL_WM_FITS,
]


class Answer(NamedTuple):
    """The whole answer."""

    rows: list[Prediction]
    summary: Summary
    errors: dict[str, dict[str, float]]  # of the overhead, over all rows and over public ones
    ablation: Ablation
    owners: list[Owners]


def answer(profile: Profile = PAPER) -> Answer:
    """Predicts, counts and compares everything. Takes seconds, mostly for owner plans."""
    rows = predictions(profile)
    errors = {"all": overhead_errors(rows), "public": overhead_errors([one for one in rows if one.is_public])}
    return Answer(rows, summarise(rows), errors, ablate(profile), compare_owners(profile))


def close_by_strategy(owners: list[Owners]) -> dict[str, int]:
    """Returns, by strategy, how many public rows have the optimizer time within 15 %."""
    public = [one for one in owners if not WORKLOADS[one.row.model].is_stand_in]
    return {
        name: sum(abs(100 * (one.optim_ms[name] / one.row.dmuon_optim - 1)) <= _CLOSE for one in public)
        for name in STRATEGIES
    }


def as_json(found: Answer) -> dict[str, Any]:
    """Returns the answer as plain data. Times are milliseconds, errors and shares percent."""
    ablation = found.ablation
    return {
        "source": SOURCE,
        "rows": [_row(one) for one in found.rows],
        "summary": {
            "counts": {name: one._asdict() for name, one in found.summary.counts.items()},
            "means": {name: one._asdict() for name, one in found.summary.means.items()},
            "overhead_errors": found.errors,
        },
        "ablation": {
            "paper": ABLATION,
            "vanilla_ms": ablation.vanilla_ms,
            "dmuon_ms": ablation.dmuon_ms,
            "without": [one._asdict() for one in ablation.without],
            "path": [one._asdict() for one in ablation.path],
        },
        "owners": [
            {"model": one.row.model, "gpus": one.row.gpus, "table_ms": one.row.dmuon_optim, "bound_ms": one.bound_ms}
            | {"optim_ms": one.optim_ms}
            for one in found.owners
        ],
        "public_rows_within_15_percent": close_by_strategy(found.owners),
        "constants": {
            name: {"value": value} | ORIGINS[name]._asdict() for name, value in dataclasses.asdict(PAPER).items()
        },
        "constants_of_ends": {
            name: value for name, value in dataclasses.asdict(ENDS_ONLY).items() if value != getattr(PAPER, name)
        },
        "models": [one._asdict() for one in WORKLOADS.values()],
        "headlines": HEADLINES,
        "misprints": misprints(),
        "notes": NOTES,
    }


def _row(one: Prediction) -> dict[str, Any]:
    return {
        "model": one.row.model,
        "gpus": one.row.gpus,
        "public": one.is_public,
        "dmuon_optim": _figure(one.dmuon_optim),
        "dmuon_step": _figure(one.dmuon_step),
        "vanilla_optim": _figure(one.vanilla_optim),
        "vanilla_step": _figure(one.vanilla_step),
        "adamw_step": {"predicted": None, "table": one.row.adamw_step, "error": None, "basis": "given"},
        "dmuon_optim_of_ends": _figure(one.dmuon_optim_of_ends),
        "overhead": {"predicted": one.overhead, "table": one.row.overhead},
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return figure._asdict() | {"error": figure.error}
