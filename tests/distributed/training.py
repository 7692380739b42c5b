"""What a training program on ranks begins with: a schedule, dedicate_params, fully_shard, a part of the batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from dmuon._setup.dedication import dedication_of
from torch.distributed.fsdp import fully_shard

import dmuon

LR = 2e-2
WEIGHT_DECAY = 0.1

# Options of dedicate_params that no trajectory may depend on. Each test names the schedule that it trains by, and they
# name different ones. The defaults are spelt out too, so that a change of them changes no test.
Schedule = dict[str, Any]


def _schedule(lookahead: int, node_copy: bool, reshard: bool, late: bool) -> Schedule:
    names = ("lookahead", "node_copy", "reshard_after_forward", "late_updates")
    return dict(zip(names, (lookahead, node_copy, reshard, late), strict=True))


AHEAD = _schedule(2, node_copy=True, reshard=True, late=True)  # the defaults on several nodes
FAR_AHEAD = _schedule(9, node_copy=True, reshard=True, late=False)  # more units than a model here has
ON_DEMAND = _schedule(0, node_copy=True, reshard=True, late=False)
NO_COPY = _schedule(3, node_copy=False, reshard=True, late=True)
KEPT = _schedule(5, node_copy=True, reshard=False, late=True)
KEPT_NO_COPY = _schedule(1, node_copy=False, reshard=False, late=False)
REPLICATED = {**_schedule(2, node_copy=True, reshard=True, late=True), "replicated": True}  # as DDP's users have it


def dedicate(model: nn.Module, mesh: Any, schedule: dict[str, Any], **options: Any) -> None:
    """`dmuon.dedicate_params` with modelled costs: to measure takes a second a model; test_measured_costs does.

    Stacks are divided however small they are.
    """
    costs = {} if "plan" in {**schedule, **options} else {"costs": "modelled"}
    dmuon.dedicate_params(model, mesh, **{**costs, **schedule, **options})
    dedication_of(model, "dedicate").planning.smallest_part = 1


def shard(model: nn.Module, mesh: Any, **kwargs: Any) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)


def place_of(mesh: Any) -> tuple[int, int]:
    """(index of this rank's part of the batch, number of parts)."""
    if mesh is None:
        return 0, 1
    flat = mesh.mesh.flatten().tolist()
    return flat.index(torch.distributed.get_rank()), len(flat)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with dmuon.full_params(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}
