"""Training by dmuon, for comparison with a single process; run on the ranks of a pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from models import batch, loss_of, make_gpt, part
from torch.distributed.fsdp import fully_shard

import dmuon


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


def train(
    mesh: Any,
    steps: int = 10,
    fsdp: bool = True,
    lr: float = 2e-2,
    dedicate: dict[str, Any] | None = None,
    muon: dict[str, Any] | None = None,
    micro_steps: int = 1,
) -> dict[str, torch.Tensor]:
    """Trains and returns every weight."""
    model = make_gpt()
    dmuon.dedicate_params(model, mesh, **(dedicate or {}))
    if fsdp and mesh is not None:
        shard(model, mesh)
    options = {"lr": lr, "weight_decay": 0.1, "ns_dtype": torch.float32, **(muon or {})}
    optimizer = dmuon.Muon(model, **options)
    rank, size = place_of(mesh)
    for step in range(steps):
        mine = part(batch(step), rank, size)
        for micro in mine.chunk(micro_steps):
            (loss_of(model, micro) / micro_steps).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)
