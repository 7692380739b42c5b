"""From a dedicated model to a running engine: what `Muon` checks and does once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._planning.plan import make_plan
from dmuon._running.runtime import Runtime, fsdp_modules
from dmuon._setup import ranks
from dmuon._setup.dedication import Dedication, remove_guards
from dmuon._setup.units import Unit


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
    place = dedication.ranks
    device = device or torch.device(dedication.ranks.device_type)
    dedication.groups = ranks.engine_groups(place)
    plan = make_plan(dedication, units, muon, device)
    problem = None
    try:
        remove_guards(dedication)
        dedication.runtime = Runtime(model, dedication, plan, units, device)
    except Exception as error:  # an owner out of memory, say
        problem = ranks.described(error)
    ranks.agree_or_raise(place, "Muon", problem, [])
    assert dedication.runtime is not None
    return dedication.runtime


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
    place, policy = dedication.ranks, dedication.mp_policy
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        rows = ranks.rows_of(parameter.device_mesh.mesh)
        if rows != place.mesh_rows:
            raise ValueError(
                f"Muon: model: '{name}' is sharded over ranks {rows}, dedicate_params was given {place.mesh_rows}. "
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
