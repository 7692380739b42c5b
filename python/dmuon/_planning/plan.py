"""Makes the plan of a model: for any mesh, or by agreement of the ranks that will train it."""

from __future__ import annotations

import inspect
import itertools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from dmuon import _C, _plan
from dmuon._planning.basis import PythonBasis
from dmuon._planning.costs import measured_costs, model_of
from dmuon._planning.inventory import inventory_of, routed
from dmuon._planning.owner_plan import DEFAULT_DEVICE, MOST_OWNERS, Plan, decide, from_file, reserve_bytes
from dmuon._setup import user_rules
from dmuon._setup.agreement import agreement, from_first
from dmuon._setup.dedication import Dedication, dedicate_params, dedication_of
from dmuon._setup.hyperparameters import RULE, Tuned, rule_of
from dmuon._setup.options import STEP, Planning, dtypes_of
from dmuon._setup.routing import DEDICATION, Select
from dmuon._setup.strategies import reads_costs
from dmuon._setup.units import Unit
from dmuon._setup.wrappers import plain_module


def plan(
    model: nn.Module,
    mesh: tuple[int, int] | None = None,
    *,
    device: str = DEFAULT_DEVICE,
    strategy: str = Planning.strategy,
    costs: str | os.PathLike[str] | None = None,
    select: Select | None = None,
    rule: str = RULE,
    tensor_parallel: int = 1,
    lookahead: int = STEP.lookahead,
    node_copy: bool = STEP.node_copy,
    replicated: bool = STEP.replicated,
    late_updates: bool | None = None,
    layout_slack: float = Planning.layout_slack,
    max_memory_bytes: int | None = Planning.max_memory_bytes,
) -> Plan:
    """Returns the plan that `dmuon.Muon` made of the model, or makes one of any model for a mesh that need not exist.

    Args:
        model: a model given to Muon; or any other, on any device ("meta" will do).
        mesh: (nodes, GPUs a node). This and all other arguments are for a model without Muon.
        device: the device that trains, as `dmuon models` lists them: its cost model, memory in reserve and links.
        strategy: as for `dedicate_params`.
        costs: the path of a table of measured costs, instead of the device's model. All else is still the device's.
        select: as for `dedicate_params`.
        rule: as for `Muon`. Memory depends on it.
        tensor_parallel: number of a node's GPUs over which every matrix is sharded.
        lookahead: as for `dedicate_params`.
        node_copy: as for `dedicate_params`.
        replicated: as for `dedicate_params`.
        late_updates: as for `dedicate_params`.
        layout_slack: as for `dedicate_params`.
        max_memory_bytes: as for `dedicate_params`.

    Raises:
        ValueError: the model is dedicated but not given to Muon yet, or has a plan and other arguments too; or an
            argument is bad.
    """
    model = plain_module(model, "plan")
    basis = PythonBasis(
        function="plan",
        device=device,
        strategy=strategy,
        costs=costs,
        rule=rule,
        tensor_parallel=tensor_parallel,
        lookahead=lookahead,
        node_copy=node_copy,
        replicated=replicated,
        late_updates=late_updates,
        layout_slack=layout_slack,
        max_memory_bytes=max_memory_bytes,
    )
    if DEDICATION in model.__dict__:
        if (runtime := dedication_of(model, "plan").runtime) is None:
            raise ValueError("plan: model: expected dmuon.Muon(model) first")
        made: Plan = runtime.plan
        if given := _changed(plan, mesh=mesh, select=select, **basis.arguments()):
            raise ValueError(
                f"plan: {', '.join(given)}: expected none for a model that dmuon.Muon has planned, whose plan this "
                f"returns; got {_as_arguments(given)}"
            )
        return made
    on = basis.mesh_of(mesh, MOST_OWNERS)
    return Plan(basis.plan(on, inventory_of(*routed(model, "plan", select), tensor_parallel > 1)))


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
    costed = (
        items if dedication.ablation.batching else list({tuple(item.sizes_of_costs()): item for item in items}.values())
    )
    numbers = itertools.accumulate(not item.continues for item in items)  # the number of each item's leaf, from 1
    dtypes = {
        sizes: dtypes_of(dedication.mp_policy, leaves[number - 1].parameter.dtype)
        for item, number in zip(items, numbers, strict=True)
        for sizes in item.sizes_of_costs()
    }
    table = None
    # A single rank owns everything. Experts of single columns are dealt by costs, whatever the strategy.
    reads = reads_costs(planning.strategy) or any(item.column is not None for item in items)
    needs_costs = planning.plan is None and reads and ranks.size > 1
    if needs_costs and planning.costs == "measured":
        shapes = Counter(sizes for item in costed for sizes in set(item.sizes_of_costs()))
        compute_dtypes = {shape: compute for shape, (compute, _) in dtypes.items()}
        table = measured_costs(ranks, shapes, _costed(muon), compute_dtypes, device, tuned)

    def plan_here() -> str:
        if planning.plan is not None:
            return from_file(planning.plan, _plan.Plan.from_json, "dedicate_params: plan: cannot read").to_json()
        given = table
        if planning.costs not in ("measured", "modelled"):
            problem = "dedicate_params: costs: expected 'measured', 'modelled' or a table, cannot read"
            given = from_file(planning.costs, _plan.CostTable.from_json, problem)
        if given is None:  # strategies that read no costs have no measured ones
            found = _plan.modelled_costs(costed, model_of(device), mesh.tensor_parallel)
        else:
            found = _plan.with_exchange(given, model_of(device), mesh.tensor_parallel)
        options = planning.native(dedication.schedule)
        options.weight_bytes = max((compute.itemsize for compute, _ in dtypes.values()), default=4)
        options.gradient_bytes = max((reduced.itemsize for _, reduced in dtypes.values()), default=4)
        options.ns_bytes = (muon["ns_dtype"] or _C.default_ns_dtype(device)).itemsize
        options.ns_steps, options.on_cpu = muon["ns_steps"], device.type == "cpu"
        options.rule = user_rules.in_plans(rule_of(muon))
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


def _costed(muon: dict[str, Any]) -> dict[str, Any]:
    """Returns the group whose times are measured. A user's rule is not called before training: Muon's times count."""
    is_users = user_rules.is_users(rule_of(muon))
    return {key: value for key, value in muon.items() if not is_users or key not in ("rule", "beta2")}


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
