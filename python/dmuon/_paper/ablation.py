"""The paper's breakdown of DMuon's gain (tab:ablation) beside the profile's figures for each component."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from dmuon._paper.owners import deal, dmuon_optim_ms, in_turn
from dmuon._paper.profile import (
    PAPER,
    Profile,
    around_ms,
    full_orthogonalisation_ms,
    library_ms,
    orthogonalisation_ms,
    update_ms,
    vanilla_optim_ms,
)
from dmuon._paper.table import ABLATION, ABLATION_GPUS, ABLATION_MODEL
from dmuon._paper.workload import WORKLOADS

SYMMETRIC, OWNERS, TUNING = ABLATION  # the table's three components


class Change(NamedTuple):
    """One component removed from DMuon, or added to what Muon-AG has already."""

    component: str
    words: str
    optim_ms: float | None  # after the change; None: the profile cannot say
    difference_ms: float | None
    share: float | None  # the difference in percent of the whole way from Muon-AG's optimizer time to DMuon's
    share_of_three: float | None = None  # in percent of the sum over three changes, one a component


class Ablation(NamedTuple):
    """Optimizer times on the breakdown's model and GPUs: without one component each, and step by step."""

    vanilla_ms: float
    dmuon_ms: float
    without: list[Change]
    path: list[Change]


def ablate(profile: Profile = PAPER) -> Ablation:
    """Removes DMuon's components one by one; and adds them to Muon-AG, one after the other."""
    workload, gpus = WORKLOADS[ABLATION_MODEL], ABLATION_GPUS
    shapes, owners = workload.shapes(), workload.num_owners(gpus)
    vanilla, dmuon = vanilla_optim_ms(profile, workload, gpus), dmuon_optim_ms(profile, workload, gpus)
    whole_way = vanilla - dmuon

    def change(component: str, words: str, before: float, after: float) -> Change:
        difference = after - before
        return Change(component, words, after, difference, 100 * abs(difference) / whole_way)

    costs = [update_ms(profile, shape) for shape in shapes]
    full = [full_orthogonalisation_ms(profile, shape) + around_ms(profile, shape) for shape in shapes]
    unbatched = dmuon_optim_ms(dataclasses.replace(profile, matrix_ms=profile.unbatched_ms), workload, gpus)
    iterations = sum(orthogonalisation_ms(profile, shape) for shape in shapes)
    symmetric = vanilla - library_ms(profile, shapes) + iterations
    three = [
        change(SYMMETRIC, "full products", dmuon, max(deal(full, owners)) + profile.fixed_ms),
        change(OWNERS, "owners in module order", dmuon, max(in_turn(costs, owners)) + profile.fixed_ms),
        change(TUNING, "one call a matrix", dmuon, unbatched),
    ]
    without = [
        *_with_shares_of_sum(three),
        change(OWNERS, "every rank computes everything, no gathers", dmuon, sum(costs) + profile.fixed_ms),
        Change(TUNING, "untuned kernels", None, None, None),
    ]
    path = [
        change(SYMMETRIC, "Muon-AG, with two segments of symmetric products", vanilla, symmetric),
        change(OWNERS, "and owners, dealt, without gathers, one call a matrix", symmetric, unbatched),
        change(TUNING, "and batches", unbatched, dmuon),
    ]
    return Ablation(vanilla, dmuon, without, path)


def _with_shares_of_sum(changes: list[Change]) -> list[Change]:
    whole = sum(one.difference_ms or 0.0 for one in changes)
    return [one._replace(share_of_three=100 * (one.difference_ms or 0.0) / whole) for one in changes]
