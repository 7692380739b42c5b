"""Training by dmuon, for comparison with a single process; run on the ranks of a pool."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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
    held: tuple[int, ...] = (),
    schedule: dict[str, Any] | None = None,
    discard: bool = False,
) -> dict[str, torch.Tensor]:
    """Trains and returns every weight; micro-steps in `held` run under no_sync.

    With `discard` each step begins with NaNs under no_sync, which are cleared.
    """
    model = make_gpt()
    dmuon.dedicate_params(model, mesh, **(dedicate or {}))
    if fsdp and mesh is not None:
        shard(model, mesh)
    for name, value in (schedule or {}).items():
        setattr(model._dmuon_dedication.schedule, name, value)
    options = {"lr": lr, "weight_decay": 0.1, "ns_dtype": torch.float32, **(muon or {})}
    optimizer = dmuon.Muon(model, **options)
    rank, size = place_of(mesh)
    for step in range(steps):
        mine = part(batch(step), rank, size)
        if discard:
            with contextlib.suppress(InterruptedError), dmuon.no_sync(model):
                with dmuon.no_sync(model):
                    (loss_of(model, mine) * float("nan")).backward()
                (loss_of(model, mine) * float("nan")).backward()  # the outer context still holds
                optimizer.zero_grad()
                raise InterruptedError
        micro_batches = mine.chunk(micro_steps)
        for index, micro in enumerate(micro_batches):
            with dmuon.no_sync(model) if index in held else contextlib.nullcontext():
                (loss_of(model, micro) * len(micro) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


@contextlib.contextmanager
def hosts_of(size: int) -> Iterator[None]:
    """As if each host had `size` ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    try:
        yield
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def train_on_hosts(mesh: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    with hosts_of(2):
        return train(mesh, **kwargs)


def norm_on_hosts(mesh: Any, size: int) -> tuple[tuple[tuple[int, ...], ...], float]:
    """(rows that dmuon makes of the mesh, gradient norm of a first step)."""
    model = make_gpt()
    with hosts_of(size):
        dmuon.dedicate_params(model, mesh)
    shard(model, mesh)
    dmuon.Muon(model)
    loss_of(model, part(batch(0), *place_of(mesh))).backward()
    return model._dmuon_dedication.ranks.rows, float(dmuon.clip_grad_norm_(model, 1.0))
