"""What trainers put around a model. Their classes are known by name, so that nothing of theirs is imported."""

from __future__ import annotations

from typing import Any

import torch.nn as nn

# Where torch.compile, and Lightning Fabric, which has two, keep the module that they were given.
_INSIDE = ("_orig_mod", "_original_module")
_FORWARD = ("_orig_mod", "_forward_module")
# They copy or cut parameters by themselves.
_REFUSED = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")


def unwrapped(model: Any) -> Any:
    """The module inside of wrappers that leave its parameters alone; what is none, itself."""
    while (inner := _child(model, _INSIDE)) is not None:
        model = inner
    return model


def refused_wrapper(model: Any) -> str | None:
    """The name of the class of a wrapper, around the model or inside of another wrapper, under which none can train."""
    while isinstance(model, nn.Module):
        for name in _REFUSED:
            if any(base.__name__ == name for base in type(model).__mro__):
                return name
        model = _child(model, _FORWARD)
    return None


def _child(model: Any, names: tuple[str, ...]) -> nn.Module | None:
    # Not by getattr: wrappers pass what they do not have on to the module inside.
    children = model._modules if isinstance(model, nn.Module) else {}
    return next((child for name in names if (child := children.get(name)) is not None), None)
