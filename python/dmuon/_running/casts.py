"""Casts and moves of a running model: what would change a matrix raises before anything has changed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from dmuon._running.runtime import Runtime


def guard_casts(runtime: Runtime) -> None:
    """From now on `to`, `float`, `cpu` and their like look at a module's matrices first: all of them call `_apply`."""
    held: dict[nn.Module, list[nn.Parameter]] = {}
    for matrix, placeholder in zip(runtime.matrices, runtime.placeholders, strict=True):
        for place in matrix.places:
            held.setdefault(place.module, []).append(placeholder)
    for module in runtime.model.modules():
        if inside := [placeholder for part in module.modules() for placeholder in held.get(part, ())]:
            module.__dict__["_apply"] = functools.partial(_apply, weakref.ref(module), inside)


def _apply(
    held: weakref.ref[nn.Module],
    inside: Sequence[nn.Parameter],
    change: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool = True,
) -> nn.Module:
    module = held()
    assert module is not None
    for placeholder in inside:
        _require_unchanged(placeholder, change)
    same: nn.Module = type(module)._apply(module, change, recurse)
    return same


@torch.no_grad()
def _require_unchanged(placeholder: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    try:
        change(placeholder)
    except ValueError as error:
        raise ValueError(
            f"dmuon: a cast or move of the model after dmuon.Muon would change '{placeholder._name}', which is "
            f"{placeholder.dtype} on {placeholder.device} and whole only at its owner. Nothing has changed. Expected: "
            "cast and move before dedicate_params, or take model.state_dict(), which has the weights, and cast or move "
            "those; mp_policy chooses the dtype of compute."
        ) from error
