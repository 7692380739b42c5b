"""The module hooks of a running model: they report the progress of a pass to the engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from dmuon import _C
from dmuon._running.runtime import Runtime
from dmuon._running.structures import map_tensors, tensors_requiring_grad


def add_hooks(runtime: Runtime) -> None:
    """Hooks the model and the modules of its units, for as long as they live."""
    # Hooks prepended after fully_shard run before FSDP2's. So the engine issues the operations of a skipped unit before
    # FSDP2 can block the host. The same holds in a backward, because we watch inputs inside of FSDP2's hook on them.
    for index, unit in enumerate(runtime.units):
        unit.module.register_forward_pre_hook(_before(runtime, index), prepend=True)
        unit.module.register_forward_pre_hook(_watch_inputs(runtime, index), with_kwargs=True)
        unit.module.register_forward_hook(_after(runtime, index), prepend=True, always_call=True)
    runtime.model.register_forward_pre_hook(_begin(runtime), prepend=True)
    runtime.model.register_forward_hook(_end(runtime), prepend=True, always_call=True)


def _begin(runtime: Runtime) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(module: nn.Module, args: Any) -> None:
        runtime.refuse_inside_full_params("a forward")
        runtime.refuse_without_values()
        if not _C.in_backward():
            runtime.step_agreement.end_failed_backward()
            runtime.show_placeholders()
        runtime.engine.begin_forward()

    return begin


def _end(runtime: Runtime) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(module: nn.Module, args: Any, output: Any) -> None:
        runtime.engine.end_forward()
        if torch.is_grad_enabled():
            runtime.engine.watch_root_outputs(tensors_requiring_grad(output))

    return end


def _before(runtime: Runtime, index: int) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(module: nn.Module, args: Any) -> None:
        runtime.refuse_inside_full_params("a forward")
        runtime.refuse_without_values()
        if not _C.in_backward():
            runtime.step_agreement.end_failed_backward()
        runtime.engine.before_forward(index)
        if runtime.units[index].host and _C.in_backward() and torch.is_grad_enabled():
            _refuse_second_recomputation(runtime, index)
        runtime.weights[index].show_weights()

    return before


def _watch_inputs(runtime: Runtime, index: int) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watch(module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = tensors_requiring_grad((args, kwargs)) if torch.is_grad_enabled() else []
        if not inputs:
            return None
        watched = dict(zip(map(id, inputs), runtime.engine.watch_inputs(index, inputs), strict=True))
        return map_tensors((args, kwargs), lambda tensor: watched.get(id(tensor), tensor))

    return watch


def _refuse_second_recomputation(runtime: Runtime, index: int) -> None:
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


def _after(runtime: Runtime, index: int) -> Any:
    def show_weights(gradient: torch.Tensor) -> None:
        runtime.refuse_inside_full_params("a backward")
        runtime.weights[index].show_weights()

    # Runs even if the forward raises, as an early-stopped recomputation does.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(module: nn.Module, args: Any, output: Any) -> None:
        runtime.weights[index].after_forward()
        runtime.engine.after_forward(index)
        if not torch.is_grad_enabled():
            return
        outputs = tensors_requiring_grad(output)
        # Before any Python hook: all of a tensor's Python hooks, FSDP2's too, run in the place of its first one.
        runtime.engine.watch_outputs(index, outputs)
        for tensor in outputs if runtime.units[index].leaves else ():
            tensor.register_hook(show_weights)

    return after
