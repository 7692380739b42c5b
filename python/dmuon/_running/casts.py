"""Guards against casts and moves of a running model: one that would change a leaf raises, or is left out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from dmuon._running.runtime import Runtime
from dmuon._setup.place import Place, State, held_inside
from dmuon._setup.replaced_method import ReplacedMethod


def guard_casts(runtime: Runtime) -> None:
    """Makes `to`, `float`, `cpu` and similar methods, which all call `_apply`, check a module's leaves first.

    Leaves out `flatten_parameters` of recurrent layers: cuDNN copies their weights in each call, and warns of that.
    """
    held: dict[nn.Module, list[tuple[Place, nn.Parameter]]] = {}
    for leaf, placeholder in zip(runtime.leaves, runtime.placeholders, strict=True):
        for place in leaf.places:
            held.setdefault(place.module, []).append((place, placeholder))
    for module, inside in held_inside(runtime.model, held):
        ReplacedMethod(module, "_apply", functools.partial(_apply, inside))
    # On CUDA it moves weights of LSTM, GRU and RNN into memory of cuDNN's, which no publication writes.
    for module in held:
        if isinstance(module, nn.RNNBase):
            ReplacedMethod(module, "flatten_parameters", lambda _inner, _module: None)


def _apply(
    inside: Sequence[tuple[Place, nn.Parameter]],
    inner: Callable[..., nn.Module],
    _module: nn.Module,
    change: Callable[[torch.Tensor], torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> nn.Module:
    for place, placeholder in inside:
        weight = _weight_at(place)
        if weight is None:
            _require_unchanged(placeholder, change)
        else:
            _require_same_memory(placeholder, weight, change)
    return inner(change, *args, **kwargs)


def _weight_at(place: Place) -> torch.Tensor | None:
    """Returns the weight inside of its unit's forward and backward, else None."""
    return place.module._parameters[place.attribute] if place.state is State.WEIGHT else None


@torch.no_grad()
def _require_same_memory(
    placeholder: Any, weight: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    # From then on the module would compute with other memory.
    changed = change(weight)
    if changed.dtype != weight.dtype or changed.device != weight.device or changed.data_ptr() != weight.data_ptr():
        raise _would_change(placeholder, weight)


@torch.no_grad()
def _require_unchanged(placeholder: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    try:
        change(placeholder)
    except ValueError as error:
        raise _would_change(placeholder, placeholder) from error


def _would_change(placeholder: Any, shown: torch.Tensor) -> ValueError:
    return ValueError(
        f"dmuon: a cast or move of the model after dmuon.Muon would change '{placeholder._name}', which is "
        f"{shown.dtype} on {shown.device} here and whole only at its owner. Nothing of this model has changed. "
        "Expected: cast and move before dedicate_params, or take model.state_dict(), which has the weights, and cast "
        "or move those; mp_policy chooses the dtype of compute."
    )
