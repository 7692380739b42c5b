"""The task of a plan for a mesh that need not exist. Imports no torch, so that the command starts at once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from dmuon import _plan
from dmuon._planning.owner_plan import decide, from_file, reserve_bytes
from dmuon._setup.option_values import require_late_updates, set_option, set_replicated


@dataclasses.dataclass(frozen=True)
class Task:
    """A model's matrices on a mesh, with costs and options."""

    inventory: list[_plan.Parameter]
    mesh: _plan.Mesh
    costs: _plan.CostTable
    options: _plan.PlanOptions

    def plan(self, strategy: str) -> _plan.Plan:
        """Makes a plan by a strategy."""
        return decide(self.inventory, self.mesh, strategy, self.costs, self.options)


def require_size(mesh: tuple[int, int], most: int, name: str) -> None:
    """Raises ValueError, which begins with `name`, if (nodes, GPUs a node) are more than `most` GPUs."""
    if mesh[0] * mesh[1] > most:
        raise ValueError(f"{name}: expected at most {most} GPUs (nodes x GPUs a node), got {mesh[0]}x{mesh[1]}")


def mesh_of(
    mesh: tuple[int, int], tensor_parallel: int, rule: str, most: int, name: Callable[[str], str]
) -> _plan.Mesh:
    """Returns the mesh of (nodes, GPUs a node), whose slots are groups of `tensor_parallel` GPUs that share matrices.

    Raises:
        ValueError: the groups do not fill a node, the rule reads whole matrices, or there are more than `most` GPUs. It
            begins with `name(argument)`.
    """
    nodes, gpus = mesh
    if gpus % tensor_parallel:
        raise ValueError(
            f"{name('tensor_parallel')}: expected a divisor of the {gpus} GPUs of a node, got {tensor_parallel}: "
            f"{name('mesh')} counts nodes x GPUs a node, and so many of a node's GPUs share every matrix; did you mean "
            f"{gpus} groups of {tensor_parallel} GPUs a node, a mesh of {nodes}x{gpus * tensor_parallel}?"
        )
    if tensor_parallel > 1 and rule != (cut := _plan.rule_names()[0]):
        expected = f"expected {cut} under tensor parallelism, which cuts matrices"
        raise ValueError(f"{name('rule')}: {expected}; got {rule}")
    require_size(mesh, most, name("mesh"))
    return _plan.Mesh(nodes, gpus // tensor_parallel, tensor_parallel)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Basis:
    """Arguments of a function, or of a command, that plans for a mesh that need not exist.

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

    def options(self, num_nodes: int, rule: str) -> _plan.PlanOptions:
        """Returns the options of a plan, as for `dedicate_params`. `rule` is as plans have it.

        Raises:
            ValueError: names `function` and the first option of a wrong type or range.
        """
        options, on_cpu = _plan.PlanOptions(), self.device == "cpu"
        for name in ("lookahead", "node_copy", "layout_slack"):
            set_option(self.function, options, name, getattr(self, name))
        set_option(self.function, options, "max_memory_bytes", self.max_memory_bytes, or_none=True)
        require_late_updates(self.function, self.late_updates)
        options.on_cpu, options.rule, options.reserve_bytes = on_cpu, rule, reserve_bytes(on_cpu)
        late = self.late_updates
        options.late_updates = _plan.updates_late(on_cpu, num_nodes) if late is None else late
        set_replicated(self.function, options, self.replicated)
        options.validate(self.function)
        return options

    def task(self, mesh: _plan.Mesh, inventory: list[_plan.Parameter], costs: str, rule: str) -> Task:
        """Divides large stacks, and takes costs from the file `costs`, or from the device's model.

        Raises:
            ValueError: an option is bad; or the file cannot be read, or lacks a shape, which begins with `costs`.
        """
        options, items = self.options(mesh.num_replicates, rule), _plan.divide(inventory, mesh)
        if self.costs is None:
            return Task(items, mesh, _plan.modelled_costs(items, self.device, mesh.tensor_parallel), options)
        table = from_file(self.costs, _plan.CostTable.from_json, f"{costs}: cannot read")
        table = _plan.with_exchange(table, self.device, mesh.tensor_parallel)
        try:
            for item in items:
                table.batches(item)
        except ValueError as error:
            raise ValueError(f"{costs}: {os.fspath(self.costs)!r}: {error}") from error
        return Task(items, mesh, table, options)
