"""From a dedicated model to a running engine: what `Muon` checks and does once."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from dmuon._planning.choices import kept_choices
from dmuon._planning.plan import inventory_of, make_plan, sizes_of
from dmuon._running.adamw import checked_adamw_groups
from dmuon._running.casts import guard_casts
from dmuon._running.divide_factor import problem_of_factors
from dmuon._running.first_values import take_first_values
from dmuon._running.hooks import add_hooks
from dmuon._running.model_state import ModelState
from dmuon._running.runtime import Runtime, find_runtime
from dmuon._setup.agreement import agreement
from dmuon._setup.dedication import Dedication, check_parameters, check_sentinels, end_setup
from dmuon._setup.groups import engine_groups
from dmuon._setup.hyperparameters import check_group, settings_of
from dmuon._setup.leaf import Leaf
from dmuon._setup.options import dtypes_of
from dmuon._setup.place import clean_name
from dmuon._setup.ranks import rows_of
from dmuon._setup.same_values import checksums, require_same_values
from dmuon._setup.sharded import fsdp_modules, managed_by_fsdp
from dmuon._setup.units import Unit, find_units

logger = logging.getLogger("dmuon")

_LARGE_UNIT = 0.25  # of all matrix bytes


def agreed_setup(
    model: nn.Module,
    dedication: Dedication,
    muon: dict[str, Any],
    adamw: dict[str, Any],
    adamw_groups: Sequence[dict[str, Any]],
) -> tuple[list[Unit], list[dict[str, Any]], torch.device | None]:
    """Checks all that `Muon` was given, and the model as it is by now. Collective.

    Returns:
        The units, AdamW's groups, and the device of the leaves, None if there are none.

    Raises:
        ValueError: on every rank, if any rank finds something wrong or the ranks differ.
    """
    meta_start = dedication.meta_start
    paused = meta_start.paused() if meta_start is not None else nullcontext()
    with paused, agreement(dedication.ranks, "Muon") as facts:
        if find_runtime(model, "Muon") is not None:
            raise ValueError("Muon: model: expected one Muon a model, got a second one")
        for group in (muon, adamw):
            check_group(group)
            facts.append(f"{settings_of(group)}")
        check_parameters(model, dedication, facts)
        _check_host_parameters(model, dedication)
        device = check_sentinels(model, dedication)
        if meta_start is not None:
            facts += meta_start.facts()
            adamw_groups = meta_start.resolved(adamw_groups)
        paths = [[place.path for place in leaf.places] for leaf in dedication.leaves]
        units = find_units(model, paths)
        _check_units(units, dedication)
        groups = checked_adamw_groups(model, dedication, adamw_groups, adamw, facts)
        if not groups and not dedication.leaves:
            raise ValueError("Muon: model: expected trainable parameters, got none")
        values = checksums(model, dedication)
        facts.append(f"compares the values of {list(values)}")
    require_same_values(dedication.ranks, values)
    return units, groups, device


def start(
    model: nn.Module,
    dedication: Dedication,
    units: list[Unit],
    muon: dict[str, Any],
    device: torch.device | None,
    optimizer: torch.optim.Optimizer,
) -> Runtime:
    """Plans owners, makes the process groups and the engine. Collective.

    Raises:
        ValueError: on every rank, if any rank fails.
    """
    if dedication.one_stage:
        divided = [leaf.name for leaf in dedication.leaves if leaf.num_columns > 1]
        if divided and dedication.ranks.num_replicates > 1:
            raise ValueError(f"Muon: one stage: expected no stacks that are divided by experts, got '{divided[0]}'")
        dedication.ranks = dedication.ranks.as_one_node()
    device = device or torch.device(dedication.ranks.device_type)
    engine_groups(dedication.ranks)  # creating them is collective; the runtime's own start is not
    shapes = {sizes_of(item) for item in inventory_of(dedication.leaves, units)}
    tuned = kept_choices(dedication.ranks, shapes, muon, device)
    plan = make_plan(dedication, units, muon, device, tuned)
    with agreement(dedication.ranks, "Muon"):  # an owner may be out of memory, say
        runtime = Runtime(model, dedication, plan, units, device, tuned, optimizer)
        add_hooks(runtime)
        ModelState(runtime)
    take_first_values(runtime, dedication)
    end_setup(dedication)
    guard_casts(runtime)
    dedication.plan, dedication.runtime = plan, runtime
    if dedication.ranks.slot == 0:
        _warn_of_large_units(runtime)
    return runtime


def _check_units(units: list[Unit], dedication: Dedication) -> None:
    """The leaves of a unit share one buffer, hence one dtype."""
    if dedication.mp_policy.param_dtype is not None:
        return
    for unit in units:
        leaves = [dedication.leaves[index] for index in unit.leaves]
        for first, leaf in itertools.pairwise(leaves):
            if leaf.parameter.dtype != first.parameter.dtype:
                raise ValueError(
                    f"Muon: model: unit '{unit.name or '(root)'}' mixes dtypes: '{first.name}' is "
                    f"{first.parameter.dtype}, '{leaf.name}' is {leaf.parameter.dtype}. Expected: one dtype a "
                    "unit, or mp_policy with param_dtype."
                )


def _check_host_parameters(model: nn.Module, dedication: Dedication) -> None:
    """The mesh of fully_shard must be ours, and what it divides gradients by; compute dtypes need FSDP's casts."""
    ranks, policy = dedication.ranks, dedication.mp_policy
    managed = {id(module._parameters[name]) for module, name in managed_by_fsdp(model)}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or not (parameter.requires_grad or id(parameter) in managed):
            continue
        rows = rows_of(parameter.device_mesh.mesh)
        if rows != ranks.mesh_rows:
            raise ValueError(
                f"Muon: model: '{name}' is sharded over ranks {rows}, dedicate_params was given {ranks.mesh_rows}. "
                "Expected: the same mesh for dedicate_params and fully_shard."
            )
        if not any(isinstance(placement, Shard) for placement in parameter.placements):  # norms would count it often
            raise ValueError(
                f"Muon: model: '{name}' is whole on every rank of {rows}: was this module given to replicate()? "
                "Expected: fully_shard on the same mesh."
            )
    _check_policies(model, dedication)
    ours = dedication.across_ranks.divide_factor(ranks.size)
    if problem := problem_of_factors(model, fsdp_modules(model), ours, untold=ours):  # it may be told until the step
        raise ValueError(problem)
    if policy.param_dtype is None or fsdp_modules(model):
        return
    for leaf in dedication.leaves:
        if leaf.parameter.dtype != policy.param_dtype:
            raise ValueError(
                f"Muon: mp_policy.param_dtype: without fully_shard nothing casts activations; expected None or "
                f"{leaf.parameter.dtype} (as '{leaf.name}' has), got {policy.param_dtype}"
            )


def _check_policies(model: nn.Module, dedication: Dedication) -> None:
    """Where FSDP2 shows its policies, those around leaves must be as dedicate_params was told."""
    around: dict[nn.Module, tuple[str, MixedPrecisionPolicy]] = {}  # by module, the innermost one's
    for path, holder in model.named_modules():  # outer modules come before inner ones
        found = getattr(getattr(holder, "_get_fsdp_state", lambda: None)(), "_mp_policy", None)
        if isinstance(found, MixedPrecisionPolicy):
            around |= dict.fromkeys(holder.modules(), (clean_name(path) or "(root)", found))
    for leaf in dedication.leaves:
        for place in leaf.places:
            path, theirs = around.get(place.module, ("", dedication.mp_policy))
            given, used = (dtypes_of(policy, leaf.parameter.dtype) for policy in (dedication.mp_policy, theirs))
            if given != used:
                raise ValueError(
                    f"Muon: mp_policy: '{leaf.name}' computes and reduces in {given[0]} and {given[1]} by "
                    f"dedicate_params, and its module '{path}' in {used[0]} and {used[1]} by fully_shard. Expected: "
                    "the same mp_policy for both."
                )


def _warn_of_large_units(runtime: Runtime) -> None:
    sizes = [sum(runtime.leaves[index].shape.numel() for index in unit.leaves) for unit in runtime.units]
    large = [
        f"'{unit.name or '(root)'}' ({size / sum(sizes):.0%})"
        for unit, size in zip(runtime.units, sizes, strict=True)
        if size > _LARGE_UNIT * sum(sizes) and _holds_blocks(unit, runtime.leaves)
    ]
    if large and runtime.ranks.size > 1:
        logger.warning(
            "dmuon moves a unit's matrices together, and these units hold more than %.0f %% of all matrix bytes: "
            "%s. Memory and overlap suffer. Split them: call fully_shard on smaller modules (each transformer "
            "block), or put blocks into a torch.nn.ModuleList.",
            100 * _LARGE_UNIT,
            ", ".join(large),
        )


def _holds_blocks(unit: Unit, leaves: list[Leaf]) -> bool:
    """Whether there is something to split: children of one module, of one class, with two of its leaves or more."""
    held = Counter(place.module for index in unit.leaves for place in leaves[index].places)
    for holder in unit.module.modules():
        blocks = (child for child in holder.children() if sum(held[module] for module in child.modules()) >= 2)
        if max(Counter(map(type, blocks)).values(), default=0) >= 2:
            return True
    return False
