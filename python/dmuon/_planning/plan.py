"""Makes the plan of a model: for any mesh, or by agreement of the ranks that will train it."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn as nn

from dmuon import _C, _plan
from dmuon._planning.costs import measured_costs, model_of
from dmuon._planning.owner_plan import DEFAULT_DEVICE, MOST_OWNERS, Plan, decide, from_file, reserve_bytes, sizes_of
from dmuon._setup.agreement import agreement, from_first
from dmuon._setup.dedication import Dedication, dedicate_params, dedication_of, plain_module
from dmuon._setup.hyperparameters import Tuned
from dmuon._setup.leaf import Leaf
from dmuon._setup.options import Planning, dtypes_of, require_path
from dmuon._setup.routing import DEDICATION, Select, route
from dmuon._setup.strategies import require_strategy
from dmuon._setup.tensor_parallel import note_slices_alone
from dmuon._setup.units import Unit, find_units
from dmuon.views import View

# Strategies that read no costs. A single rank, which owns everything, reads no measured costs either.
_WITHOUT_COSTS = ("round_robin", "rank0", "xor_layout")


def plan(
    model: nn.Module,
    mesh: tuple[int, int] | None = None,
    *,
    device: str = DEFAULT_DEVICE,
    strategy: str = Planning.strategy,
    costs: str | os.PathLike[str] | None = None,
    select: Select | None = None,
) -> Plan:
    """Returns the plan that `dmuon.Muon` made of the model, or makes one of any model for a mesh that need not exist.

    Args:
        model: a model given to Muon; or any other, on any device ("meta" will do).
        mesh: (nodes, GPUs a node). This and all other arguments are for a model without Muon.
        device: the device whose cost model decides, as `dmuon models` lists them.
        strategy: as for `dedicate_params`.
        costs: the path of a table of measured costs, instead of a device.
        select: as for `dedicate_params`.

    Raises:
        ValueError: the model is dedicated but not given to Muon yet, or has a plan and other arguments too; or the
            device or strategy is unknown.
    """
    model = plain_module(model, "plan")
    if DEDICATION in model.__dict__:
        if (runtime := dedication_of(model, "plan").runtime) is None:
            raise ValueError("plan: model: expected dmuon.Muon(model) first")
        made: Plan = runtime.plan
        if given := _changed(plan, mesh=mesh, device=device, strategy=strategy, costs=costs, select=select):
            raise ValueError(
                f"plan: {', '.join(given)}: expected none for a model that dmuon.Muon has planned, whose plan this "
                f"returns; got {_as_arguments(given)}"
            )
        return made
    if not isinstance(mesh, tuple | list) or len(mesh) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in mesh):
        raise ValueError(f"plan: mesh: expected (nodes, GPUs a node) for a model without dmuon.Muon; got {mesh!r}")
    if mesh[0] * mesh[1] > MOST_OWNERS:
        raise ValueError(
            f"plan: mesh: expected at most {MOST_OWNERS} owners, as planning for more takes minutes; got {mesh}"
        )
    require_basis("plan", device, strategy, costs)
    leaves, units = _routed(model, "plan", select)
    return Plan(plan_on(mesh, inventory_of(leaves, units), "plan", device, strategy, costs))


def require_basis(function: str, device: str, strategy: str, costs: str | os.PathLike[str] | None) -> None:
    """Raises ValueError unless a plan for a mesh that need not exist can be based on these."""
    require_strategy(strategy, function)
    if device not in _plan.device_names():
        raise ValueError(f"{function}: device: expected one of {_plan.device_names()}, got {device!r}")
    if costs is not None:
        require_path(costs, f"{function}: costs")
    if costs in ("measured", "modelled"):
        raise ValueError(
            f"{function}: costs: expected the path of a table, or None for the model of {device!r}; got {costs!r}, "
            "which dedicate_params takes"
        )


def plan_on(
    mesh: tuple[int, int],
    items: list[_plan.Parameter],
    function: str,
    device: str,
    strategy: str,
    costs: str | os.PathLike[str] | None,
    late_updates: bool | None = None,
) -> _plan.Plan:
    """Makes a plan for a mesh that need not exist, of what `require_basis` accepts. `function` is named in errors."""
    on = _plan.Mesh(*mesh)
    items = _plan.divide(items, on)
    if costs is None:
        table = _plan.modelled_costs(items, device)
    else:
        table = from_file(costs, _plan.CostTable.from_json, f"{function}: costs: cannot read the table")
    options = _plan.PlanOptions()
    options.on_cpu = device == "cpu"
    late = _plan.updates_late(options.on_cpu, mesh[0])
    options.late_updates = late if late_updates is None else late_updates
    options.reserve_bytes = reserve_bytes(options.on_cpu)
    return decide(items, on, strategy, table, options)


def inventory(model: nn.Module, select: Select | None = None) -> dict[str, Any]:
    """Returns the matrices that Muon would update in a model. Write them with json.dump for `dmuon plan --inventory`.

    Args:
        model: any model before `dedicate_params` and `fully_shard`, on any device ("meta" will do). If tensor
            parallelism has cut it already, the matrices that it leaves whole are marked for `--tp`.
        select: as for `dedicate_params`.

    Raises:
        ValueError: the model is dedicated or sharded already.
    """
    model = plain_module(model, "inventory")
    leaves, units = _routed(model, "inventory", select)
    is_parallel = note_slices_alone(model, leaves, "inventory")
    items = inventory_of(leaves, units)
    name = type(model).__name__
    return {
        "schema_version": 1,
        "name": name,
        "description": f"The matrices that dmuon takes of a {name}.",
        "source": "dmuon.inventory",
        "stand_in": False,
        "training": _outside_of(model, leaves),
        # In module order: a unit whose leaves lie between others' has several entries.
        "units": [
            _entry(units[unit].name, unit, list(run), is_parallel)
            for unit, run in groupby(items, key=lambda item: item.unit)
        ],
    }


def _outside_of(model: nn.Module, leaves: list[Leaf]) -> dict[str, int]:
    """Returns what predictions of a step need about parameters that Muon does not take."""
    taken = {id(leaf.parameter) for leaf in leaves}
    others = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return {
        "outside_elements": sum(parameter.numel() for parameter in others),
        "outside_flops": sum(2 * parameter.numel() for parameter in others if id(parameter) in linear),
    }


def _entry(unit: str, index: int, items: list[_plan.Parameter], is_parallel: bool) -> dict[str, Any]:
    """Returns an entry of an inventory. The entry has no name if a tied leaf lies outside its unit.

    `is_parallel`: the model is under tensor parallelism.
    """
    prefix = f"{unit}."
    if not unit or not all(item.name.startswith(prefix) for item in items):
        unit, prefix = "", ""
    listed = [
        {"name": item.name.removeprefix(prefix), "rows": item.rows, "cols": item.cols}
        | ({"num_matrices": item.num_matrices} if item.num_matrices > 1 else {})
        | ({"column_blocks": item.column_blocks} if item.column_blocks > 1 else {})
        | ({"transposed": True} if item.transposed else {})
        | ({"continues": True} if item.continues else {})
        | ({"column": item.column} if item.column is not None else {})
        | ({"whole": True} if is_parallel and not item.tensor_parallel else {})
        for item in items
    ]
    return {"name": unit, "unit": index, "matrices": listed}


def _routed(model: nn.Module, function: str, select: Select | None) -> tuple[list[Leaf], list[Unit]]:
    leaves, _ = route(model, select, function)
    return leaves, find_units(model, [[place.path for place in leaf.places] for leaf in leaves])


def inventory_of(leaves: list[Leaf], units: list[Unit]) -> list[_plan.Parameter]:
    """Returns the leaves as parameters of a plan.

    A leaf of several views, or one that is divided by experts, becomes several parts: "name[0:1]" and so on.
    """
    unit_of = {leaf: index for index, unit in enumerate(units) for leaf in unit.leaves}
    items = []
    for index, leaf in enumerate(leaves):
        end = 0
        for number, view in enumerate(_parts_of(leaf)):
            begin, end = end, end + view.count
            name = f"{leaf.name}[{begin}:{end}]" if len(leaf.views) > 1 or leaf.num_columns > 1 else leaf.name
            items.append(
                _plan.Parameter(
                    name,
                    view.rows,
                    view.cols,
                    unit_of[index],
                    num_matrices=view.count,
                    continues=begin > 0,
                    column=number if leaf.num_columns > 1 else None,
                    column_blocks=view.column_blocks,
                    transposed=view.transposed,
                    tensor_parallel=leaf.cut is not None,
                )
            )
    return items


def _parts_of(leaf: Leaf) -> Sequence[View]:
    """Returns the leaf's views, or each column's part of a stack that is divided by experts."""
    if leaf.num_columns == 1:
        return leaf.views
    view = leaf.views[0]
    return [dataclasses.replace(view, count=view.count // leaf.num_columns)] * leaf.num_columns


def _changed(function: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Returns the values that differ from the function's defaults."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if value != parameters[name].default}


def _as_arguments(given: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in given.items())


def _require_alone(planning: Planning) -> None:
    """Raises ValueError for options that a loaded plan would make ineffective."""
    values = {name: getattr(planning, name) for name in ("strategy", "costs", "layout_slack")}
    if given := _changed(dedicate_params, **values):
        raise ValueError(
            f"dedicate_params: plan: expected no {' or '.join(given)} beside the file of a plan, which has its own; "
            f"got plan={planning.plan!r} and {_as_arguments(given)}"
        )


def make_plan(
    dedication: Dedication,
    units: list[Unit],
    muon: dict[str, Any],
    device: torch.device,
    tuned: Tuned,
) -> Plan:
    """Makes or loads the plan at slot 0, sends it to every rank, and compares its hash. Collective."""
    if dedication.planning.plan is not None:
        _require_alone(dedication.planning)  # equal on all ranks after dedicate_params, so all raise
    ranks, planning, leaves = dedication.ranks, dedication.planning, dedication.leaves
    mesh = ranks.shape
    items = _plan.divide(inventory_of(leaves, units), mesh, planning.smallest_part)
    # Without batching, costs are of single matrices, so one of each shape is enough.
    costed = items if dedication.ablation.batching else list({sizes_of(item): item for item in items}.values())
    numbers = itertools.accumulate(not item.continues for item in items)  # the number of each item's leaf, from 1
    dtypes = {
        sizes_of(item): dtypes_of(dedication.mp_policy, leaves[number - 1].parameter.dtype)
        for item, number in zip(items, numbers, strict=True)
    }
    table = None
    needs_costs = planning.plan is None and planning.strategy not in _WITHOUT_COSTS and ranks.size > 1
    if needs_costs and planning.costs == "measured":
        shapes = Counter(sizes_of(item) for item in costed)
        compute_dtypes = {shape: compute for shape, (compute, _) in dtypes.items()}
        table = measured_costs(ranks, shapes, muon, compute_dtypes, device, tuned)

    def plan_here() -> str:
        if planning.plan is not None:
            return from_file(planning.plan, _plan.Plan.from_json, "dedicate_params: plan: cannot read").to_json()
        if planning.costs not in ("measured", "modelled"):
            problem = "dedicate_params: costs: expected 'measured', 'modelled' or a table, cannot read"
            found = from_file(planning.costs, _plan.CostTable.from_json, problem)
        else:  # strategies that read no costs have no measured ones
            found = table or _plan.modelled_costs(costed, model_of(device), mesh.tensor_parallel)
        found = _plan.with_exchange(found, model_of(device), mesh.tensor_parallel)
        options = planning.native(dedication.schedule)
        options.weight_bytes = max((compute.itemsize for compute, _ in dtypes.values()), default=4)
        options.gradient_bytes = max((reduced.itemsize for _, reduced in dtypes.values()), default=4)
        options.ns_bytes = (muon["ns_dtype"] or _C.default_ns_dtype(device)).itemsize
        options.ns_steps, options.on_cpu = muon["ns_steps"], device.type == "cpu"
        options.reserve_bytes = reserve_bytes(options.on_cpu)
        return decide(items, mesh, planning.strategy, found, options).to_json()

    text = from_first(ranks, plan_here)
    with agreement(ranks, "Muon") as facts:
        result = Plan(_plan.Plan.from_json(text))
        result.native.require_fit(items, mesh)
        if planning.plan is not None:
            _require_within(planning, result, device)
        facts.append(f"plan hash {result.native.hash()}")
    return result


def _require_within(planning: Planning, loaded: Plan, device: torch.device) -> None:
    """Raises ValueError if a loaded plan, by the options in its file, exceeds max_memory_bytes."""
    reserve, most = reserve_bytes(device.type == "cpu"), planning.max_memory_bytes
    least = max(loaded.memory_bytes, default=0) + reserve
    if most is not None and least > most:
        reserved = f" and {reserve} in reserve for the device" if reserve else ""
        raise ValueError(
            f"dedicate_params: max_memory_bytes: expected >= {least}, the peak of the plan {planning.plan!r}"
            f"{reserved}, got {most}"
        )
