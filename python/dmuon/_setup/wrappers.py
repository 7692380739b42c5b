"""Wrappers that trainers put around a model. They are known by the names of their classes, so nothing is imported."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from dmuon._setup.ways_out import IN_PLACE_OF_DDP

# The attributes in which torch.compile (one) and Lightning Fabric (two) store the module that they wrap.
_INSIDE = ("_orig_mod", "_original_module")
# Wrappers that copy or cut parameters by themselves, with the way out.
_REFUSED = {
    "DistributedDataParallel": IN_PLACE_OF_DDP,
    "DataParallel": IN_PLACE_OF_DDP,
    "FullyShardedDataParallel": "the model without it; dmuon and fully_shard average all gradients",
}


def unwrapped(model: Any) -> Any:
    """Returns the module inside of wrappers that do not change its parameters, or the model itself."""
    while (inner := _inside(model)) is not None:
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
        bases = {base.__name__ for base in type(module).__mro__}
        for wrapper, way_out in _REFUSED.items():
            if wrapper in bases:
                where = f" at '{path}'" if path else ""
                raise ValueError(
                    f"{function}: model: expected a plain module, or one under fully_shard, got {wrapper}{where}, "
                    f"which copies or cuts parameters by itself. Expected: {way_out}."
                )
    plain: nn.Module = unwrapped(model)
    return plain


def _inside(model: Any) -> nn.Module | None:
    # Not by getattr, which wrappers answer with the attribute of the module inside.
    children = model._modules if isinstance(model, nn.Module) else {}
    return next((child for name in _INSIDE if (child := children.get(name)) is not None), None)
