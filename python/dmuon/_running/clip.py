"""Clipping by the joint norm of owned and other gradients."""

from __future__ import annotations

import math

import torch
import torch.nn as nn

from dmuon._running import host_gradients
from dmuon._running.step_agreement import step_agreement_of


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scales all gradients of `model` so that their joint 2-norm is at most `max_norm`.

    Collective over the mesh: one message, which the next `step()` then does not send. The norm is of the mean
    gradient over all ranks. Where it is not finite, gradients stay as they are and `step()` skips.

    Returns:
        The norm before clipping: a 0-dimensional fp32 tensor, equal on every rank.

    Raises:
        ValueError: the model has no dmuon.Muon yet, or `max_norm` is no positive number.
    """
    step_agreement = step_agreement_of(model, "clip_grad_norm_")
    runtime = step_agreement.runtime
    runtime.refuse_inside_full_params("clip_grad_norm_")
    problem = None
    single = max_norm.numel() == 1 if isinstance(max_norm, torch.Tensor) else isinstance(max_norm, int | float)
    if not single or not float(max_norm) > 0:
        problem = f"clip_grad_norm_: max_norm: expected a positive number, got {max_norm!r}"
    verdict = step_agreement.verdict(None if problem else float(max_norm), problem)
    if not verdict.finite:
        return torch.tensor(math.nan, device=runtime.device)
    squared = [norm for norm, has in zip(verdict.squared_norms, verdict.has_gradient, strict=True) if has]
    norm = math.sqrt(sum(squared) + verdict.host_squared_norm)
    factor = float(max_norm) / (norm + 1e-6)
    if factor < 1:
        runtime.state.scale_gradients(factor)
        host_gradients.scale(step_agreement.host_parameters(), factor)
        runtime.engine.scale_verdict(factor)
    return torch.tensor(norm, dtype=torch.float32, device=runtime.device)
