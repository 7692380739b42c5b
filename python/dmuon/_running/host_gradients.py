"""Gradients of the parameters that AdamW updates: their mean over the ranks, and their norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon import _C
from dmuon._setup.groups import column_group, row_group
from dmuon._setup.ranks import Ranks


def average(parameters: Sequence[nn.Parameter], ranks: Ranks, engine: _C.Engine) -> list[torch.Tensor]:
    """Averages over all ranks the gradients of parameters that no fully_shard manages. Missing ones count as zeros.

    Collective: one message in the row and one in the column. A parameter without a gradient on all ranks gets none.

    Returns:
        The gradients that this rank lacked before.
    """
    plain = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    if ranks.size == 1 or not plain:
        return []
    # Only a rank that lacks a gradient reads from the device which ones exist, because reading waits for the device.
    knows = all(p.grad is not None for p in plain)
    present = (
        plain[0].new_ones(len(plain), dtype=torch.float32)
        if knows
        else torch.tensor([float(p.grad is not None) for p in plain], dtype=torch.float32, device=plain[0].device)
    )
    pieces = [
        p.new_zeros(p.numel(), dtype=torch.float32) if p.grad is None else p.grad.flatten().float() for p in plain
    ]
    flat = torch.cat([present, *pieces])
    engine.drain()
    what = "the mean of the gradients that no fully_shard manages"
    engine.leave(what)
    try:
        add_up(flat, ranks)
    except RuntimeError as error:
        raise RuntimeError(f"dmuon: {what} failed: a rank died, or did not come. Reported: {error}") from error
    means = (flat[len(plain) :] / ranks.size).split([p.numel() for p in plain])
    has = [True] * len(plain) if knows else flat[: len(plain)].tolist()
    made = []
    for anywhere, parameter, mean in zip(has, plain, means, strict=True):
        if not anywhere:
            continue
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
            made.append(parameter.grad)
        parameter.grad.copy_(mean.view_as(parameter))
    return made


def add_up(words: torch.Tensor, ranks: Ranks) -> None:
    """Sums a tensor over all ranks, in place. Collective. Drain the engine before: lanes use these groups too."""
    for group in (row_group(ranks), column_group(ranks)):
        if group is not None:
            dist.all_reduce(words, group=group)


def squared_norms(parameters: Sequence[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Returns [2] fp64: the squared norms of this rank's shards of gradients, and of the whole gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    sharded = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    return torch.stack([_squared_norm(sharded, device), _squared_norm(whole, device)])


def scale(parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiplies every gradient, or this rank's shard of it, by a []."""
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))  # FSDP2 may offload them


def _squared_norm(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    # fp64: the squares of small and of large gradients leave fp32's range.
    found = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    return torch.stack(list(found)).square().sum().to(device)  # FSDP2 may offload gradients
