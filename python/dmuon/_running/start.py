"""From a dedicated model to a running engine: what `Muon` checks and does once."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._planning.plan import PLAN, make_plan
from dmuon._running.hooks import add_hooks
from dmuon._running.host_gradients import fsdp_modules
from dmuon._running.runtime import Runtime
from dmuon._setup.agreement import agreement
from dmuon._setup.dedication import Dedication, remove_guards
from dmuon._setup.groups import engine_groups
from dmuon._setup.ranks import rows_of
from dmuon._setup.units import Unit

logger = logging.getLogger("dmuon")

_LARGE_UNIT = 0.25  # of all matrix bytes


def start(
    model: nn.Module,
    dedication: Dedication,
    units: list[Unit],
    muon: dict[str, Any],
    device: torch.device | None,
) -> Runtime:
    """Plans owners, makes the process groups and the engine. Collective.

    Raises:
        ValueError: on every rank, if any rank fails.
    """
    if dedication.schedule.one_stage:
        dedication.ranks = dedication.ranks.as_one_node()
    device = device or torch.device(dedication.ranks.device_type)
    engine_groups(dedication.ranks)  # creating them is collective; the runtime's own start is not
    plan = make_plan(dedication, units, muon, device)
    with agreement(dedication.ranks, "Muon"):  # an owner may be out of memory, say
        runtime = Runtime(model, dedication, plan, units, device)
        add_hooks(runtime)
        remove_guards(dedication)
        model.__dict__[PLAN] = plan
    if dedication.ranks.slot == 0:
        _warn_of_large_units(runtime)
    return runtime


def check_units(units: list[Unit], dedication: Dedication) -> None:
    """The matrices of a unit share one buffer, hence one dtype."""
    if dedication.mp_policy.param_dtype is not None:
        return
    for unit in units:
        first = dedication.matrices[unit.matrices[0]]
        for matrix in (dedication.matrices[index] for index in unit.matrices):
            if matrix.parameter.dtype != first.parameter.dtype:
                raise ValueError(
                    f"Muon: model: unit '{unit.name or '(root)'}' mixes dtypes: '{first.name}' is "
                    f"{first.parameter.dtype}, '{matrix.name}' is {matrix.parameter.dtype}. Expected: one dtype a "
                    "unit, or mp_policy with param_dtype."
                )


def check_host_parameters(model: nn.Module, dedication: Dedication) -> None:
    """The mesh of fully_shard must be ours; compute dtypes need FSDP's casts."""
    ranks, policy = dedication.ranks, dedication.mp_policy
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        rows = rows_of(parameter.device_mesh.mesh)
        if rows != ranks.mesh_rows:
            raise ValueError(
                f"Muon: model: '{name}' is sharded over ranks {rows}, dedicate_params was given {ranks.mesh_rows}. "
                "Expected: the same mesh for dedicate_params and fully_shard."
            )
    if policy.param_dtype is None or fsdp_modules(model):
        return
    for matrix in dedication.matrices:
        if matrix.parameter.dtype != policy.param_dtype:
            raise ValueError(
                f"Muon: mp_policy.param_dtype: without fully_shard nothing casts activations; expected None or "
                f"{matrix.parameter.dtype} (as '{matrix.name}' has), got {policy.param_dtype}"
            )


def _warn_of_large_units(runtime: Runtime) -> None:
    """Units that a smaller one could take the place of: where all are as large as they are few, there is none."""
    sizes = [sum(runtime.matrices[m].shape.numel() for m in unit.matrices) for unit in runtime.units]
    large = [
        f"'{unit.name or '(root)'}' ({size / sum(sizes):.0%})"
        for unit, size in zip(runtime.units, sizes, strict=True)
        if size > _LARGE_UNIT * sum(sizes)
    ]
    if large and runtime.ranks.size > 1:
        logger.warning(
            "dmuon moves a unit's matrices together, and these units hold more than %.0f %% of all matrix bytes: "
            "%s. Memory and overlap suffer. Split them: call fully_shard on smaller modules (each transformer "
            "block), or put blocks into a torch.nn.ModuleList.",
            100 * _LARGE_UNIT,
            ", ".join(large),
        )
