"""Starts the engine of a dedicated model, after the checks in checks.py. `Muon` does so once."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn as nn

from dmuon import _plan
from dmuon._planning.choices import cached_choices
from dmuon._planning.inventory import inventory_of
from dmuon._planning.plan import make_plan
from dmuon._running.buffers import copies_buffers
from dmuon._running.casts import guard_casts
from dmuon._running.checks import FAILED, check_host_parameters, check_parameters, check_sentinels, check_units
from dmuon._running.first_values import FirstValues
from dmuon._running.given_groups import Given, first_groups
from dmuon._running.graphs import wants_graphs
from dmuon._running.hooks import add_hooks
from dmuon._running.model_state import ModelState
from dmuon._running.runtime import Runtime, find_runtime
from dmuon._setup import user_rules
from dmuon._setup.agreement import agreement
from dmuon._setup.dedication import Dedication
from dmuon._setup.groups import process_groups, slots_group
from dmuon._setup.guards import refuse_fully_shard
from dmuon._setup.heap import give_back_heap
from dmuon._setup.hyperparameters import RULE, check_group, rule_of, settings_of
from dmuon._setup.leaf import Leaf
from dmuon._setup.members import former_parameters
from dmuon._setup.resolve_ranks import device_of
from dmuon._setup.same_values import checksums, require_same_values
from dmuon._setup.tensor_parallel import is_sharded
from dmuon._setup.units import Unit, find_units

logger = logging.getLogger("dmuon")

_LARGE_UNIT = 0.25  # of all matrix bytes
_LEAST_LARGE_UNIT = 1 << 22  # elements: adapters of LoRA are less, and cost little memory or time together


def agreed_setup(
    model: nn.Module, dedication: Dedication, given: Given
) -> tuple[list[Unit], list[dict[str, Any]], list[dict[str, Any]], torch.device | None]:
    """Checks the arguments of `Muon` and the present model. Collective.

    Returns:
        The units, `first_groups`, and the leaves' device, None if there are no leaves.

    Raises:
        ValueError: on every rank, if any rank finds something wrong or the ranks differ.
    """
    before_muon, former = dedication.before_muon, former_parameters(model)  # before the pause: stand-ins too
    meta_start = dedication.meta_start
    paused = meta_start.paused() if meta_start is not None else nullcontext()
    with paused, agreement(dedication.ranks, "Muon") as facts:
        if find_runtime(model, "Muon") is not None:
            raise ValueError(
                "Muon: model: expected one Muon a model, got a second one. To begin anew with the first one: "
                "opt.state.clear(), and new values in opt.param_groups."
            )
        if before_muon is None:
            raise ValueError(FAILED)
        before_muon.attributes.give(model.modules())
        dedication.former.update(former)
        wants_graphs()
        for group in (given.muon, given.adamw):
            check_group(group)
            facts.append(f"{settings_of(group)}")
        facts.append(user_rules.fact(rule_of(given.muon)))
        _require_whole_matrices(given.muon, dedication)
        check_parameters(model, dedication.leaves, before_muon, facts)
        check_host_parameters(model, dedication)
        device = check_sentinels(model, dedication)
        if meta_start is not None:
            facts += meta_start.facts()
        paths = [[place.path for place in leaf.places] for leaf in dedication.leaves]
        dtypes = [] if dedication.mp_policy.param_dtype else [leaf.parameter.dtype for leaf in dedication.leaves]
        units = find_units(model, paths, before_muon.chosen_units, dtypes)
        check_units(units, dedication)
        muon, adamw = first_groups(model, dedication, given, facts)
        if not muon and not adamw:
            raise ValueError("Muon: model: expected trainable parameters, got none")
        values = checksums(model, dedication)
        facts.append(f"compares the values of {list(values)}")
    require_same_values(dedication.ranks, values)
    return units, muon, adamw, device


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
    if dedication.ablation.one_stage:
        divided = [leaf.name for leaf in dedication.leaves if leaf.num_columns > 1]
        if divided and dedication.ranks.num_replicates > 1:
            raise ValueError(f"Muon: one stage: expected no stacks that are divided by experts, got '{divided[0]}'")
        dedication.ranks = dedication.ranks.as_one_node()
    device = device or device_of(model, dedication.ranks.device_type)
    dedication.ranks = dataclasses.replace(dedication.ranks, device_index=device.index)
    if dedication.ranks.size == 1:  # alone, the model may have gone anywhere since
        dedication.ranks = dataclasses.replace(dedication.ranks, device_type=device.type)
    before_muon = dedication.before_muon
    assert before_muon is not None
    if before_muon.late_updates is None:
        dedication.schedule.late_updates = _plan.updates_late(device.type == "cpu", dedication.ranks.num_replicates)
    process_groups(dedication.ranks)  # collective, so outside of the agreement below
    is_plain = (p.requires_grad and not is_sharded(p, dedication.ranks) for p in model.parameters())
    if copies_buffers(dedication) or any(is_plain):
        slots_group(dedication.ranks)  # likewise
    shapes = {sizes for item in inventory_of(dedication.leaves, units) for sizes in item.sizes_of_costs()}
    tuned = cached_choices(dedication.ranks, shapes, muon, device)
    plan = make_plan(dedication, units, muon, device, tuned)
    with agreement(dedication.ranks, "Muon"):  # an owner may lack memory, for example
        dedication.before_muon = None
        runtime = Runtime(model, dedication, before_muon, plan, units, device, tuned, optimizer, rule_of(muon))
        add_hooks(runtime)
        ModelState(runtime)
        first_values = FirstValues(runtime, dedication, before_muon.meta_start)
    first_values.copy()
    with agreement(dedication.ranks, "Muon"):
        first_values.raise_failure()
        before_muon.end()
        refuse_fully_shard(model, dedication.leaves)
        guard_casts(runtime)
    runtime.plain.join()
    if device.type == "cpu":
        give_back_heap()  # the values of before, of which owners have copies; and what costs were measured with
    if dedication.ranks.owner == 0:
        _warn_of_large_units(runtime)
    return runtime


def _require_whole_matrices(muon: dict[str, Any], dedication: Dedication) -> None:
    """Raises ValueError for a rule that needs whole matrices, if ranks have slices."""
    size, rule = dedication.ranks.tensor_parallel, rule_of(muon)
    if rule != RULE and size > 1:
        raise ValueError(
            f"Muon: rule: expected '{RULE}' for a model under tensor parallelism, got '{rule}', which needs whole "
            f"matrices: each of {size} ranks has a slice."
        )


def _warn_of_large_units(runtime: Runtime) -> None:
    sizes = [sum(runtime.leaves[index].shape.numel() for index in unit.leaves) for unit in runtime.units]
    large = [
        f"'{unit.label}' ({size / sum(sizes):.0%})"
        for unit, size in zip(runtime.units, sizes, strict=True)
        if size > max(_LARGE_UNIT * sum(sizes), _LEAST_LARGE_UNIT) and _holds_blocks(unit, runtime.leaves)
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
    """True if the unit can be split: a module has two children of one class that hold two leaves or more each."""
    held = Counter(place.module for index in unit.leaves for place in leaves[index].places)
    for holder in itertools.chain.from_iterable(module.modules() for module in unit.modules):
        blocks = (child for child in holder.children() if sum(held[module] for module in child.modules()) >= 2)
        if max(Counter(map(type, blocks)).values(), default=0) >= 2:
            return True
    return False
