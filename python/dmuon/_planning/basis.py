"""The arguments that `dmuon.plan` and `dmuon.simulate` share: a plan for a mesh that need not exist rests on them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from dmuon import _plan
from dmuon._planning.task import mesh_of, plan_options, task_of
from dmuon._setup import user_rules
from dmuon._setup.option_values import require, require_path
from dmuon._setup.strategies import require_strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Basis:
    """Arguments of a function that plans for a mesh that need not exist.

    Attributes:
        function: its name in errors. See `dmuon.plan` for all others.
    """

    function: str
    device: str
    strategy: str
    costs: str | os.PathLike[str] | None
    rule: str
    tensor_parallel: int
    lookahead: int
    node_copy: bool
    replicated: bool
    late_updates: bool | None
    layout_slack: float
    max_memory_bytes: int | None

    def arguments(self) -> dict[str, object]:
        """Returns the function's arguments by name."""
        return {name: value for name, value in vars(self).items() if name != "function"}

    def mesh_of(self, mesh: Any, most: int) -> _plan.Mesh:
        """Returns the mesh of (nodes, GPUs a node), whose slots are groups of `tensor_parallel` GPUs.

        Raises:
            ValueError: it is no such pair, as `mesh_of` says, or has more than `most` GPUs.
        """
        good = isinstance(mesh, tuple | list) and len(mesh) == 2 and all(type(n) is int and 0 < n < 2**31 for n in mesh)
        unless = " unless the model has dmuon.Muon" if self.function == "plan" else ""
        require(self.function, good, "mesh", f"(nodes, GPUs a node) of GPUs that need not exist{unless}", mesh)
        good = type(self.tensor_parallel) is int and self.tensor_parallel >= 1
        require(self.function, good, "tensor_parallel", "an int, at least 1", self.tensor_parallel)
        require(self.function, isinstance(self.rule, str), "rule", "the name of a rule", self.rule)
        return mesh_of(mesh, self.tensor_parallel, self.rule, most, lambda argument: f"{self.function}: {argument}")

    def plan(self, mesh: _plan.Mesh, matrices: list[_plan.Parameter]) -> _plan.Plan:
        """Makes the plan.

        Raises:
            ValueError: an argument is bad.
        """
        require_strategy(self.strategy, self.function)
        known = _plan.device_names()
        require(self.function, self.device in known, "device", f"one of {known}", self.device)
        if self.costs is not None:
            require_path(self.costs, f"{self.function}: costs")
        named = self.costs in ("measured", "modelled")
        table_or_none = f"the path of a table, or None for the model of {self.device!r}, unlike dedicate_params"
        require(self.function, not named, "costs", table_or_none, self.costs)
        options = plan_options(
            self.function,
            on_cpu=self.device == "cpu",
            num_nodes=mesh.num_replicates,
            rule=user_rules.in_plans(self.rule),
            lookahead=self.lookahead,
            node_copy=self.node_copy,
            replicated=self.replicated,
            late_updates=self.late_updates,
            layout_slack=self.layout_slack,
            max_memory_bytes=self.max_memory_bytes,
        )
        argument = f"{self.function}: costs"
        return task_of(matrices, mesh, self.device, self.costs, argument, options).plan(self.strategy)
