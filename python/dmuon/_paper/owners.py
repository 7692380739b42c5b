"""Assigns owners: by the deal that fits the paper's table best, by other strategies, and by dmuon's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dmuon import _plan
from dmuon._paper.profile import PAPER, Profile, update_ms
from dmuon._paper.table import GPUS_A_NODE, ROWS, Row
from dmuon._paper.workload import WORKLOADS, Shape, Workload

# All names but the first are dmuon's own.
DEALT, ROUND_ROBIN, XOR_LAYOUT, RANK0, LOAD_BALANCE = "dealt", "round_robin", "xor_layout", "rank0", "load_balance"
STRATEGIES = (DEALT, ROUND_ROBIN, XOR_LAYOUT, RANK0, LOAD_BALANCE)


class Owners(NamedTuple):
    """Optimizer milliseconds of one row's model and GPUs by strategy, and the least that any owners could have."""

    row: Row
    optim_ms: dict[str, float]
    bound_ms: float


def in_turn(costs: Sequence[float], num_owners: int) -> list[float]:
    """Returns each owner's sum if matrices go to owners in turn, in the order given."""
    return [sum(costs[owner::num_owners]) for owner in range(num_owners)]


def deal(costs: Sequence[float], num_owners: int) -> list[float]:
    """Returns each owner's sum if the costliest matrix is dealt first. Owners get equal numbers, up to one."""
    return in_turn(sorted(costs, reverse=True), num_owners)


def dmuon_optim_ms(profile: Profile, workload: Workload, gpus: int) -> float:
    """Returns DMuon's optimizer time if matrices are dealt: the slowest owner's, and a fixed time of every step."""
    costs = [update_ms(profile, shape) for shape in workload.shapes()]
    return max(deal(costs, workload.num_owners(gpus))) + profile.fixed_ms


def compare_owners(profile: Profile = PAPER) -> list[Owners]:
    """Assigns owners for every row's model and GPUs by each strategy, at the profile's times."""
    return [_owners_of(profile, row) for row in ROWS]


def _owners_of(profile: Profile, row: Row) -> Owners:
    workload = WORKLOADS[row.model]
    inventory, shapes = _plan.model(workload.catalogue_name).inventory, workload.shapes()
    mesh = _plan.Mesh(row.gpus // GPUS_A_NODE, workload.num_owners(GPUS_A_NODE))
    costs = [update_ms(profile, shape) for shape in shapes]
    table = cost_table(profile, inventory, shapes)
    plans = [_plan.make_plan(inventory, mesh, name, table, _plan.PlanOptions()) for name in (XOR_LAYOUT, LOAD_BALANCE)]
    slowest = {
        DEALT: max(deal(costs, mesh.num_owners())),
        ROUND_ROBIN: max(in_turn(costs, mesh.num_owners())),
        RANK0: sum(costs),
    } | {plan.strategy: plan.makespan_ns / 1e6 for plan in plans}
    times = {name: slowest[name] + profile.fixed_ms for name in STRATEGIES}
    return Owners(row, times, plans[-1].bound_ns / 1e6 + profile.fixed_ms)


def cost_table(profile: Profile, inventory: Sequence[_plan.Parameter], shapes: list[Shape]) -> _plan.CostTable:
    """Returns times of single matrices: the profile spreads a batch's launches evenly over its matrices."""
    times = {
        (1, item.rows, item.cols): round(update_ms(profile, shape) * 1e6)
        for item, shape in zip(inventory, shapes, strict=True)
    }
    return _plan.CostTable("profile of the paper's engine", [(sizes, [(1, ns)]) for sizes, ns in times.items()])
