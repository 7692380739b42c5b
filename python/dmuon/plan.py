"""Who owns what: the plan, as Python sees it."""

from __future__ import annotations

import torch

from dmuon import _C, ranks
from dmuon.routing import Matrix
from dmuon.units import Unit


class Plan:
    """Owners and batches of a model's matrices; equal on every rank. Prints as a table.

    Attributes:
        owner: for each matrix, in module order, the slot (replicate * num_shards + shard) of its owner.
        batches: (slot, matrices) of equal shapes that are updated together.
        makespan_s: predicted seconds of the slowest owner's update.
        lower_bound_s: no plan can have a smaller makespan under the same costs.
    """

    def __init__(self, plan: _C.Plan, inventory: list[_C.Matrix]) -> None:
        self._plan = plan
        self._inventory = inventory
        self.owner: list[int] = plan.owner
        self.batches: list[tuple[int, list[int]]] = plan.batches
        self.makespan_s: float = plan.makespan_s
        self.lower_bound_s: float = plan.lower_bound_s

    def to_json(self) -> str:
        """The plan as JSON, as a rank receives it."""
        return self._plan.to_json()

    def table(self) -> str:
        """What each owner holds and its predicted time."""
        return self._plan.table(self._inventory)

    def hash(self) -> int:
        """Equal for equal plans of equal matrices, on every machine."""
        return self._plan.hash(self._inventory)

    def __str__(self) -> str:
        return self.table()


def make_plan(
    place: ranks.Ranks, matrices: list[Matrix], units: list[Unit], strategy: str, device: torch.device
) -> Plan:
    """Plans at slot 0, sends the plan to every rank, compares its hash. Collective."""
    unit_of = {matrix: index for index, unit in enumerate(units) for matrix in unit.matrices}
    inventory = [
        _C.Matrix(matrix.name, matrix.shape[0], matrix.shape[1], unit_of[index])
        for index, matrix in enumerate(matrices)
    ]

    def plan_here() -> str:
        plan = _C.make_plan(inventory, place.num_replicates, place.num_shards, strategy, device.type)
        return plan.to_json()

    text = ranks.from_first(place, plan_here)
    plan = None
    problem = None
    try:
        plan = Plan(_C.Plan.from_json(text, inventory), inventory)
    except ValueError as error:
        problem = str(error)
    facts = [] if plan is None else [f"plan hash {plan.hash()}"]
    ranks.agree_or_raise(place, "Muon", problem, facts)
    assert plan is not None
    return plan
