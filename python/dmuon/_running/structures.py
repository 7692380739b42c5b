"""Tensors inside the nested structures that modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

TensorMap = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(value: Any, change: TensorMap) -> Any:
    """Returns `value` with `change` applied to every tensor in tuples, lists, mappings and dataclasses.

    Copies containers only if something in them changes. Returns other objects unchanged.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return _map_fields(value, change)
    return value


def _map_fields(value: Any, change: TensorMap) -> Any:
    # A mapping that is a dataclass too (a transformers ModelOutput) keeps both views in step by its __setitem__.
    mapping = isinstance(value, Mapping)
    names = list(value) if mapping else [field.name for field in dataclasses.fields(value)]
    read = value.__getitem__ if mapping else value.__getattribute__
    changed = {name: new for name in names if (new := map_tensors(read(name), change)) is not read(name)}
    if not changed:
        return value
    copied = copy.copy(value)
    for name, new in changed.items():
        if mapping:
            copied[name] = new
        else:
            object.__setattr__(copied, name, new)  # a frozen dataclass too
    return copied


def tensors_requiring_grad(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in `value` that requires grad, each once, in order."""
    found: dict[int, torch.Tensor] = {}
    map_tensors(value, lambda tensor: found.setdefault(id(tensor), tensor))
    return [tensor for tensor in found.values() if tensor.requires_grad]
