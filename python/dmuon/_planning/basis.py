"""The arguments that `dmuon.plan` and `dmuon.simulate` share: a plan for a mesh that need not exist rests on them."""

from __future__ import annotations

from typing import Any

from dmuon import _plan
from dmuon._planning.task import Basis, mesh_of
from dmuon._setup import user_rules
from dmuon._setup.option_values import require, require_path
from dmuon._setup.strategies import require_strategy


class PythonBasis(Basis):
    """Those of a function in Python, which no parser has checked."""

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
        rule = user_rules.in_plans(self.rule)
        return self.task(mesh, matrices, f"{self.function}: costs", rule).plan(self.strategy)
