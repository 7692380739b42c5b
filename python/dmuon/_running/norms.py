"""Norms of whole matrices, for logs. No rank needs a whole weight for them."""

from __future__ import annotations

import torch
import torch.nn as nn

from dmuon._running.host_gradients import add_up
from dmuon._running.runtime import runtime_of
from dmuon._running.step_agreement import of_leaves
from dmuon._saving.owned_shards import MASTER

_PIECE = 1 << 24  # elements in fp64 at once


@torch.no_grad()
def grad_norms(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the 2-norm (Frobenius) of the gradient of each matrix that Muon updates, by its name.

    Collective over the mesh, between backward and `step()`. Sends one message, which `clip_grad_norm_` and `step()`
    then do not send. The norms are of the mean gradient over all ranks, or of the sum divided by
    `gradient_divide_factor`; after `clip_grad_norm_`, of the clipped gradients. Does not wait for the device.

    Args:
        model: a model with dmuon.Muon.

    Returns:
        0-dimensional fp32 tensors, equal on every rank; 0 if no rank had a gradient, inf also for NaN.

    Raises:
        ValueError: the model has no dmuon.Muon yet. Or, on every rank, an error of `clip_grad_norm_`.
    """
    runtime = runtime_of(model, "grad_norms")
    runtime.access.refuse("grad_norms()", whole=True)
    return dict(zip((leaf.name for leaf in runtime.leaves), runtime.step_agreement.owned_norms(), strict=True))


@torch.no_grad()
def weight_norms(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the 2-norm (Frobenius) of each matrix that Muon updates, by its name.

    Collective over the mesh, outside of a forward or backward. Every owner computes the norms of its fp32 masters, and
    one number a matrix travels. Does not wait for the device.

    Args:
        model: a model with dmuon.Muon.

    Returns:
        0-dimensional fp32 tensors, equal on every rank.

    Raises:
        ValueError: the model has no dmuon.Muon yet, or ranks have come to different calls.
    """
    runtime = runtime_of(model, "weight_norms")
    runtime.meet("weight_norms()", whole=True)
    # Of a matrix that is not cut each word is 0 on all ranks but one, so every order of addition gives the same bits.
    squares = torch.zeros(sum(map(len, runtime.parts)), dtype=torch.float64, device=runtime.device)
    for index in range(len(runtime.leaves)):
        counts = runtime.leaves[index].cut is not None or runtime.ranks.tensor_rank == 0
        for part in runtime.transfers.owned_parts(index, MASTER) if counts else ():
            pieces = torch._foreach_norm(list(part.tensor.view(-1).split(_PIECE)), 2, dtype=torch.float64)
            squares[part.parameter] = torch.stack(list(pieces)).square().sum()
    runtime.engine.drain()
    add_up(squares, runtime.ranks, over_slices=True)
    norms = of_leaves(squares.sqrt(), runtime.parts)
    return dict(zip((leaf.name for leaf in runtime.leaves), norms, strict=True))
