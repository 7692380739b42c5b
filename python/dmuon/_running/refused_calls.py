"""Refusals of a module's calls, and of their backwards."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn as nn

from dmuon._running.runtime import Runtime
from dmuon._running.structures import is_transformed


def refuse_changed_weights(runtime: Runtime, name: str, version: int, gradient: torch.Tensor | None = None) -> None:
    """Raises ValueError if the forward of a backward had another version of the weights."""
    if runtime.version != version:
        raise ValueError(
            f"dmuon: a backward through '{name}', whose weights have changed since the forward, by a step, a load or a "
            "write. Its gradients would be of neither weights. Expected: all backwards of a forward before the change, "
            "or a new forward after it."
        )


def dtype_of_autocast(runtime: Runtime, index: int) -> torch.dtype | None:
    """Returns a unit's dtype of compute if autocast alone can cast activations to it, else None."""
    leaves = runtime.units[index].leaves
    if not leaves:
        return None
    dtype = runtime.engine.unit(index).weight_tensors()[0].dtype
    sharded = {module for holder in runtime.fsdp_modules for module in cast("nn.Module", holder).modules()}
    alone = any(place.module not in sharded for leaf in leaves for place in runtime.leaves[leaf].places)
    return dtype if alone and any(runtime.placeholders[leaf].dtype != dtype for leaf in leaves) else None


def refuse_other_casts(runtime: Runtime, index: int, dtype: torch.dtype) -> None:
    """Raises ValueError unless autocast casts activations to the dtype of the weights."""
    device_type = runtime.device.type
    enabled = torch.is_autocast_enabled(device_type)
    if enabled and torch.get_autocast_dtype(device_type) == dtype:
        return
    where = f"under autocast to {torch.get_autocast_dtype(device_type)}" if enabled else "outside of autocast"
    raise ValueError(
        f"dmuon: mp_policy.param_dtype: '{runtime.units[index].label}' is called {where}, and without fully_shard "
        f"around it nothing else casts activations to {dtype}. Expected: the call of the model inside "
        f"torch.autocast('{device_type}', {dtype}), or param_dtype=None."
    )


def refuse_differentiated_parameters(model: nn.Module) -> None:
    """Raises ValueError if a transform of torch.func has the model's parameters as its inputs."""
    if not is_transformed():
        return
    wrapped = (n for n, p in model.named_parameters() if torch._C._functorch.is_functorch_wrapped_tensor(p))
    if (name := next(wrapped, None)) is not None:
        raise ValueError(
            f"dmuon: torch.func.functional_call inside a transform of torch.func, such as grad, with '{name}' as its "
            "input, whose values are here inside of its module's calls alone. Expected: backward or "
            "torch.autograd.grad. Transforms of the model's inputs are possible, with reshard_after_forward=False."
        )


def refuse_second_recomputation(runtime: Runtime, index: int) -> None:
    """Raises ValueError if reentrant checkpoints recompute an FSDPModule twice in a backward: FSDP2 loses gradients."""
    node = torch._C._current_autograd_node()
    if node is None or "CheckpointFunction" not in node.name():
        return
    unit, backward = runtime.units[index], runtime.engine.num_backwards
    if runtime.recomputed.get(index) == backward:
        raise ValueError(
            f"dmuon: '{unit.label}' is under fully_shard and used twice inside a reentrant checkpoint: "
            "FSDP2 loses gradients there. Expected: checkpoints with use_reentrant=False, or fully_shard around them."
        )
    runtime.recomputed[index] = backward
