"""The profile's predictions beside the rows of the paper's table, each marked by the use of its row in a fit."""

from __future__ import annotations

from typing import NamedTuple

from dmuon._paper.owners import dmuon_optim_ms
from dmuon._paper.profile import ENDS_ONLY, PAPER, Profile, dmuon_step_ms, vanilla_optim_ms, vanilla_step_ms
from dmuon._paper.table import ROWS, Row
from dmuon._paper.workload import WORKLOADS

FITTED, HELD_OUT = "fitted", "held out"
END_GPUS = (8, 256)  # rows of public models that the vanilla constants were fitted to


class Figure(NamedTuple):
    """A predicted time beside the table's, both in milliseconds."""

    predicted: float
    table: float
    basis: str  # FITTED: the row was used to fit a constant of this figure; else HELD_OUT

    @property
    def error(self) -> float:
        """Percent of the table's time."""
        return 100 * (self.predicted / self.table - 1)


class Prediction(NamedTuple):
    """Predictions of one row. The AdamW step is read from the row: the profile does not predict it."""

    row: Row
    dmuon_optim: Figure
    dmuon_step: Figure
    vanilla_optim: Figure
    vanilla_step: Figure
    dmuon_optim_of_ends: Figure  # by constants of the 8- and 256-GPU rows alone

    @property
    def is_public(self) -> bool:
        """True if the model's sizes are public."""
        return not WORKLOADS[self.row.model].is_stand_in

    @property
    def is_end(self) -> bool:
        """True for the smallest and the largest number of GPUs."""
        return self.row.gpus in END_GPUS

    @property
    def overhead(self) -> float:
        """DMuon's predicted step above AdamW's, in percent of AdamW's."""
        return 100 * (self.dmuon_step.predicted / self.row.adamw_step - 1)

    @property
    def step_speedup(self) -> float:
        """Vanilla's predicted step over DMuon's."""
        return self.vanilla_step.predicted / self.dmuon_step.predicted

    @property
    def optim_speedup(self) -> float:
        """Vanilla's predicted optimizer time over DMuon's."""
        return self.vanilla_optim.predicted / self.dmuon_optim.predicted


def predictions(profile: Profile = PAPER) -> list[Prediction]:
    """Predicts all 24 rows."""
    return [_predicted(profile, row) for row in ROWS]


def _predicted(profile: Profile, row: Row) -> Prediction:
    workload = WORKLOADS[row.model]
    is_held_out = row.gpus not in END_GPUS and not workload.is_stand_in
    held_out = HELD_OUT if is_held_out else FITTED
    optim = dmuon_optim_ms(profile, workload, row.gpus)
    vanilla = vanilla_optim_ms(profile, workload, row.gpus)
    return Prediction(
        row,
        Figure(optim, row.dmuon_optim, FITTED),
        Figure(dmuon_step_ms(profile, workload, row.gpus, optim, row.adamw_step), row.dmuon_step, FITTED),
        Figure(vanilla, row.vanilla_optim, held_out),
        Figure(vanilla_step_ms(profile, workload, vanilla, row.adamw_step), row.vanilla_step, held_out),
        Figure(dmuon_optim_ms(ENDS_ONLY, workload, row.gpus), row.dmuon_optim, held_out),
    )
