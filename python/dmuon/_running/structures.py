"""Tensors inside the nested structures that modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch._functorch.pyfunctorch import GradInterpreter, retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from dmuon._setup.placeholder import OwnedTensor

TensorMap = Callable[[torch.Tensor], torch.Tensor]

# What a walk has met: structures by id, which it keeps alive, each with what takes its place.
_Met = dict[int, tuple[Any, Any]]

_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})


def map_tensors(value: Any, change: TensorMap) -> Any:
    """Returns `value` with `change` applied to every tensor in tuples, lists, mappings and dataclasses.

    Changes lists, mappings and dataclasses in place, so that whoever writes into them later writes into the same ones.
    Copies tuples, frozen dataclasses and read-only mappings if something in them changes. Returns other objects
    unchanged, also those of a class that cannot be copied so. Visits what several structures share, or what refers to
    itself, once.
    """
    return _mapped(value, change, {})


def _mapped(value: Any, change: TensorMap, met: _Met) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if id(value) in met:
        return met[id(value)][1]
    if isinstance(value, tuple):
        items = [item if type(item) in _LEAVES else _mapped(item, change, met) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        result = value if is_same else _rebuilt(value, getattr(value, "_make", type(value)), items)
        # A list inside that holds this tuple has met it first.
        return met.setdefault(id(value), (value, result))[1]
    if isinstance(value, list):
        met[id(value)] = value, value
        for index, item in enumerate(value):
            if type(item) not in _LEAVES and (new := _mapped(item, change, met)) is not item:
                list.__setitem__(value, index, new)  # some refuse that anyone but their class writes
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module)
    return _map_fields(value, change, met) if isinstance(value, Mapping) or is_record else value


def _rebuilt(value: Any, make: Callable[[Any], Any], content: Any) -> Any:
    """Returns `make(content)` in place of `value`, or the value if its class is made in a way of its own."""
    try:
        made = make(content)
    except TypeError:
        return value
    return made if len(made) == len(content) else value


def _map_fields(value: Any, change: TensorMap, met: _Met) -> Any:
    met[id(value)] = value, value
    # A mapping that is a dataclass too (a transformers ModelOutput) keeps both views in step by its __setitem__.
    mapping = isinstance(value, Mapping)
    names = list(value.keys()) if mapping else [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    read = value.__getitem__ if mapping else value.__getattribute__
    entries = {name: read(name) for name in names}
    changed = {
        name: new
        for name, old in entries.items()
        if type(old) not in _LEAVES and (new := _mapped(old, change, met)) is not old
    }
    if not changed:
        return value
    result = _with_entries(value, changed) if mapping else _with_fields(value, changed)
    met[id(value)] = value, result
    return result


def _with_fields(value: Any, fields: dict[str, Any]) -> Any:
    if value.__dataclass_params__.frozen:
        value = copy.copy(value)
    for name, new in fields.items():
        object.__setattr__(value, name, new)  # a frozen dataclass too
    return value


def _with_entries(value: Any, entries: dict[Any, Any]) -> Any:
    try:
        for name, new in entries.items():
            value[name] = new
    except (TypeError, RuntimeError):  # it is read-only, or locked
        return _rebuilt(value, type(value), {**value, **entries})
    return value


def tensors_requiring_grad(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in `value` that requires grad, each once, in order.

    Inside a transform of torch.func, or of forward-mode differentiation, these are the tensors that autograd knows:
    what the transform's wrappers hold, and tangents.
    """
    found: dict[int, torch.Tensor] = {}
    map_tensors(value, lambda tensor: found.setdefault(id(tensor), tensor))
    tensors = list(found.values())
    if is_transformed():
        tensors = list({id(inner): inner for tensor in tensors for inner in _inside(tensor)}.values())
    return [tensor for tensor in tensors if tensor.requires_grad]


def computed_tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors that require grad and have a value, except leaves, on which hooks would outlive a graph."""
    found = tensors_requiring_grad(value)
    return [tensor for tensor in found if tensor.grad_fn is not None and not isinstance(tensor, OwnedTensor)]


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: AsyncCollectiveTensor) -> torch.Tensor:
        waited: torch.Tensor = tensor.wait()
        return waited

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor itself, or what a collective of DTensor is about to fill.

    A compiled module would give such an input, an AsyncCollectiveTensor, a gradient of zero.
    """
    if not isinstance(tensor, AsyncCollectiveTensor):
        return tensor
    waited: torch.Tensor = _Arrived.apply(tensor)  # type: ignore[no-untyped-call]
    return waited


def is_transformed() -> bool:
    """Returns True inside a transform of torch.func, and where tensors may have tangents."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def is_differentiated_again() -> bool:
    """Returns True inside a gradient of torch.func whose result belongs to a graph of its own."""
    return any(
        isinstance(each, GradInterpreter) and each.prev_grad_mode() for each in retrieve_all_functorch_interpreters()
    )


def _inside(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensor, or what a wrapper of torch.func holds, and tangents of all levels."""
    if forward_ad._current_level >= 0 and (tangent := forward_ad.unpack_dual(tensor).tangent) is not None:
        yield from _inside(tangent)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        yield from _inside(torch._C._functorch.get_unwrapped(tensor))
    else:
        yield tensor
