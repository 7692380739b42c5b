"""Gradients of the parameters that AdamW updates: norms, scaling; and sums over ranks for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._setup.groups import column_group, row_group, slices_group
from dmuon._setup.ranks import Ranks
from dmuon._setup.slices import local_of
from dmuon._setup.tensor_parallel import is_sharded, is_sliced


def add_up(words: torch.Tensor, ranks: Ranks, over_slices: bool = False) -> None:
    """Sums a tensor over the slots, in place, or with `over_slices` over all ranks. Collective.

    Drain the engine before: lanes use these groups too.
    """
    for group in (row_group(ranks), column_group(ranks), slices_group(ranks) if over_slices else None):
        if group is not None:
            dist.all_reduce(words, group=group)


def sparse_error(name: str) -> ValueError:
    """Returns the error of a parameter whose gradient is sparse."""
    return ValueError(f"dmuon: the gradient of {name} is sparse. Expected: nn.Embedding(sparse=False).")


def squared_norms(parameters: Sequence[nn.Parameter], device: torch.device, ranks: Ranks) -> torch.Tensor:
    """Returns [2] fp64: the squared norms of this rank's shards of gradients, and of what slots have as wholes.

    With tensor parallelism also of those of both that all ranks of a slot have. They count in the first two numbers at
    the slot's first rank alone.
    """
    copies: list[torch.Tensor] = []
    shards: list[torch.Tensor] = []
    wholes: list[torch.Tensor] = []
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise sparse_error(f"a parameter of shape {tuple(parameter.shape)}")
        is_cut = False
        if isinstance(gradient, DTensor):
            gradient = local_of(gradient, parameter.placements)  # type: ignore[attr-defined]
            is_cut = is_sliced(parameter, ranks)
        held = shards if is_sharded(parameter, ranks) else wholes
        if is_cut or ranks.tensor_rank == 0:
            held.append(gradient)
        if not is_cut and ranks.tensor_parallel > 1:
            copies.append(gradient)
    norms = [_squared_norm(shards, device), _squared_norm(wholes, device)]
    return torch.stack([*norms, _squared_norm(copies, device)] if ranks.tensor_parallel > 1 else norms)


def scale(parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiplies every gradient, or this rank's shard of it, by a []."""
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    for device, on_device in _by_device(gradients).items():
        torch._foreach_mul_(on_device, factor.to(device))


def _squared_norm(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    # fp64: the squares of small and of large gradients leave fp32's range.
    found = [
        torch.stack(list(torch._foreach_norm(on_device, 2, dtype=torch.float64))).square().sum().to(device)
        for on_device in _by_device([tensor for tensor in tensors if tensor.numel()]).values()
    ]
    if not found:
        return torch.zeros((), dtype=torch.float64, device=device)
    return found[0] if len(found) == 1 else torch.stack(found).sum()


def _by_device(tensors: list[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    """Returns the tensors by their devices: FSDP2 may offload some to the host."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found
