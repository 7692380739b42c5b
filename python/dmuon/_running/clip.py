"""Clipping by the joint norm of owned and other gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from dmuon._running.runtime import Runtime, runtime_of
from dmuon._setup.option_values import real_number
from dmuon._setup.shown import shown


@torch.compiler.disable(reason="dmuon.clip_grad_norm_ sends messages")  # type: ignore[untyped-decorator]
@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module | Iterable[nn.Module],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Scales gradients of `model` so that their joint 2-norm is at most `max_norm`. Collective over the mesh.

    Gradients of AdamW's parameters that are in no group of the optimizer neither count nor change.

    Sends one message, which the next `step()` then does not send; two, and a mean, if gradients of AdamW's parameters
    that no fully_shard manages are no means yet, as after `no_sync`. The norm is of the mean gradient over all ranks,
    or of the sum divided by `gradient_divide_factor` of `dedicate_params`. If the norm is not finite, gradients do
    not change and `step()` skips. Only `error_if_nonfinite` waits for the device.

    Several models have one norm, for one message each. With `pp_mesh` the gradients of all pipeline stages have one
    norm, for one more message along `pp_mesh`. If the gradients of one model or stage are not finite, or if this call
    raises on another stage, all gradients become NaN. So all models and stages skip, until their gradients are cleared.
    `dmuon.grad_norms` before this call says whose they are.

    Args:
        model: a model with dmuon.Muon; or a list of such models, each with a Muon of its own, on meshes of the same
            ranks.
        max_norm: a positive number.
        norm_type: must be 2, because owners send squared norms.
        error_if_nonfinite: True to raise if the norm is not finite.
        foreach: has no effect; torch's function has it.
        pp_mesh: the stages of a pipeline, a 1-D mesh. A rank with several stages gives a list. All ranks of the
            pipeline must make this call with equal numbers, which they do not compare.

    Returns:
        The norm before clipping: a 0-dimensional fp32 tensor, equal on every rank; NaN if it is not finite.

    Raises:
        ValueError: the model has no dmuon.Muon yet; or, on every rank, an argument is bad or differs between ranks.
        RuntimeError: on every rank, if the norm is not finite and `error_if_nonfinite` is True.
    """
    try:
        agreements = [runtime.step_agreement for runtime in _runtimes(model)]
        problem = _problem(max_norm, norm_type, error_if_nonfinite, pp_mesh)
        numbers = {} if problem else {"max_norm": float(max_norm), "number of models": len(agreements)}
        switches = {"error_if_nonfinite": error_if_nonfinite, "pp_mesh is not None": pp_mesh is not None}
        arguments = [f"clip_grad_norm_'s {name} = {value}" for name, value in {**numbers, **switches}.items()]
        verdicts = [agreement.verdict(arguments, problem) for agreement in agreements]
    except Exception:
        if _is_line(pp_mesh):  # the other stages wait for this rank
            no_norm = torch.full((), math.nan, dtype=torch.float64, device=pp_mesh.device_type)
            dist.all_reduce(no_norm, group=pp_mesh.get_group())
        raise
    norm, finite, otherwise = verdicts[0].norm(), verdicts[0].finite(), 1.0
    if pp_mesh is not None or len(verdicts) > 1:
        norms = [torch.where(verdict.finite(), verdict.norm(), math.nan).double() for verdict in verdicts]
        squared = torch.stack(norms).square().sum()
        if pp_mesh is not None:
            dist.all_reduce(squared, group=pp_mesh.get_group())
        # A factor of NaN lets the others skip, also with a new verdict, until their gradients are cleared.
        norm, finite, otherwise = squared.sqrt(), squared.isfinite(), math.nan
    if error_if_nonfinite and not finite:
        raise RuntimeError(
            "clip_grad_norm_: expected a finite norm of all gradients, got one that is not, and error_if_nonfinite=True"
        )
    factor = torch.where(finite, float(max_norm) / (norm + 1e-6), otherwise).clamp_(max=1.0).float()
    for agreement in agreements:
        agreement.scale(factor)
    return torch.where(finite, norm, math.nan).float()


def _runtimes(model: nn.Module | Iterable[nn.Module]) -> list[Runtime]:
    """Returns the runtimes of a model or of several, after a check of each."""
    models: list[Any] = [model]
    if isinstance(model, Iterable) and not isinstance(model, nn.Module):
        models = list(model)
    if not models:
        raise ValueError(
            "clip_grad_norm_: model: expected a model with dmuon.Muon or a list of them, got an empty list"
        )
    runtimes = [runtime_of(part, "clip_grad_norm_") for part in models]
    for index, runtime in enumerate(runtimes):
        if runtime in runtimes[:index]:
            raise ValueError(f"clip_grad_norm_: model[{index}]: expected each model once, got one again")
        runtime.access.refuse("clip_grad_norm_", whole=True)
    return runtimes


def _problem(max_norm: Any, norm_type: Any, error_if_nonfinite: Any, pp_mesh: Any) -> str | None:
    if (number := real_number(max_norm)) is None or not number > 0:
        return f"clip_grad_norm_: max_norm: expected a positive number, got {shown(max_norm)}"
    if real_number(norm_type) != 2:
        return f"clip_grad_norm_: norm_type: expected 2, the only norm that is supported, got {norm_type!r}"
    if not isinstance(error_if_nonfinite, bool):
        return f"clip_grad_norm_: error_if_nonfinite: expected True or False, got {error_if_nonfinite!r}"
    if pp_mesh is not None and not _is_line(pp_mesh):
        return f"clip_grad_norm_: pp_mesh: expected a one-dimensional DeviceMesh or None, got {pp_mesh!r}"
    return None


def _is_line(mesh: Any) -> TypeGuard[DeviceMesh]:
    return isinstance(mesh, DeviceMesh) and mesh.ndim == 1
