"""Wrappers that trainers put around a model. They are known by the names of their classes, so nothing is imported."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from dmuon._setup.ways_out import IN_PLACE_OF_DDP

# The attributes in which torch.compile (one) and Lightning Fabric (two) store the module that they wrap.
_INSIDE = ("_orig_mod", "_original_module")
# Wrappers that copy or cut parameters by themselves.
_REFUSED = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def unwrapped(model: Any) -> Any:
    """Returns the module inside of wrappers that do not change its parameters, or the model itself."""
    while (inner := _child(model, _INSIDE)) is not None:
        model = inner
    return model


def plain_module(model: nn.Module, function: str) -> nn.Module:
    """Returns the module inside the wrappers of torch.compile and of trainers.

    Raises:
        ValueError: `model` is not a module, or a wrapper, around it or inside, copies parameters. Names `function`.
    """
    if not isinstance(model, nn.Module):
        hint = ": pass the model, not its parameters" if isinstance(model, torch.Tensor) else ""
        raise ValueError(f"{function}: model: expected a torch.nn.Module, got {type(model).__name__}{hint}")
    for path, module in model.named_modules():
        if (wrapper := _refused_class(module)) is not None:
            raise ValueError(_refusal(function, wrapper, path))
    plain: nn.Module = unwrapped(model)
    return plain


def _refused_class(module: nn.Module) -> str | None:
    bases = {base.__name__ for base in type(module).__mro__}
    return next((name for name in _REFUSED if name in bases), None)


def _refusal(function: str, wrapper: str, path: str) -> str:
    where = f" at '{path}'" if path else ""
    copies = wrapper in ("DistributedDataParallel", "DataParallel")
    return (
        f"{function}: model: expected a plain module, or one under fully_shard, got {wrapper}{where}, which copies or "
        f"cuts parameters by itself. Expected: "
        f"{IN_PLACE_OF_DDP if copies else 'the model without it; dmuon and fully_shard average all gradients'}."
    )


def _child(model: Any, names: tuple[str, ...]) -> nn.Module | None:
    # Not by getattr, which wrappers answer with the attribute of the module inside.
    children = model._modules if isinstance(model, nn.Module) else {}
    return next((child for name in names if (child := children.get(name)) is not None), None)
