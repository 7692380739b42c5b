"""FSDP2's own state between the calls of a step: gradients that it has not reduced, and a backward that raised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from dmuon._setup.sharded import name_of, param_groups


def problem_of_unreduced(model: nn.Module, modules: Sequence[FSDPModule]) -> str | None:
    """Returns an error about the first module whose gradients FSDP2 has not reduced, or None.

    Matrices are reduced after each backward, so a step would train them alone. The flags themselves say nothing: users
    may have set them back since the backward.
    """
    for module in modules:
        state = module._get_fsdp_state()
        # FSDP2 sets the second aside until a backward that is the last one. PyTorch 2.13 renamed it.
        waits = any(getattr(state._comm_ctx, f"reduce_scatter_state{plural}", None) for plural in ("", "s"))
        if waits or any(_is_unreduced(group) for group in param_groups(state)):
            return (
                f"dmuon: clip or step: FSDP2 has not reduced the gradients of '{name_of(module, model)}', because "
                "set_requires_gradient_sync(False), set_requires_all_reduce(False) or set_is_last_backward(False) was "
                "called, or they were frozen after a backward under no_sync. Expected: True in each of them before the "
                "last backward of a step, and parameters that are frozen between steps alone. Or one torch.autocast "
                "was around several forwards, and its cache kept casts of weights that FSDP2 had freed. Expected: an "
                "autocast around each forward."
            )
    return None


def discard_unreduced(modules: Sequence[FSDPModule], has_sums: bool) -> list[nn.Parameter]:
    """Discards gradients that FSDP2 would add to those of the next reduced backward.

    Args:
        modules: the modules under fully_shard.
        has_sums: True if FSDP2 has partial sums over the replicates.

    Returns:
        The trainable parameters of the groups that had some.

    Raises:
        ValueError: this PyTorch stores the sums elsewhere.
    """
    held = []
    for group in (group for module in modules for group in param_groups(module._get_fsdp_state())):
        if has_sums and not hasattr(group, "_partial_reduce_output"):
            raise ValueError(
                "dmuon: zero_grad() after a backward under no_sync: FSDP2 keeps its own partial sums over the "
                "replicates, and where is not known for this PyTorch. Expected: zero_grad() after a backward "
                "outside of no_sync."
            )
        if _is_unreduced(group):
            held += [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]
            _discard(group)
    return held


def let_gathers_wait(modules: Sequence[FSDPModule]) -> None:
    """Lets FSDP2's next gathers wait for what the current stream has written. FSDP2 itself does so in a new forward."""
    states = [module._get_fsdp_state() for module in modules]
    for state in {id(state._comm_ctx): state for state in states}.values():
        if (stream := getattr(state._comm_ctx, "all_gather_copy_in_stream", None)) is not None:  # a forward makes it
            stream.wait_stream(state._device_handle.current_stream())


def end_backward_of_fsdp2(modules: Sequence[FSDPModule]) -> bool:
    """Ends FSDP2's backward if it has raised: FSDP2 itself would reduce no gradients any more.

    Does what FSDP2's callback at the end of a backward does, without a message. Gradients that FSDP2 has not reduced
    are lost.

    Returns:
        True if a backward has raised.

    Raises:
        AttributeError: this PyTorch keeps the state of a backward elsewhere.
    """
    states: dict[int, Any] = {}  # of each root
    for module in modules:
        state = module._get_fsdp_state()
        if state._state_ctx.post_backward_final_callback_queued:
            states[id(state._state_ctx)] = state
    for state in states.values():
        context, communication = state._state_ctx, state._comm_ctx
        for of in context.all_states:
            of._training_state = TrainingState.IDLE
            of._modules_to_run_forward.clear()
            for group in param_groups(of):
                group.finalize_backward()
                group._training_state = TrainingState.IDLE
                group.reshard()
                _discard(group)
        if (gathered := communication.all_gather_state) is not None:
            for stream in (communication.all_gather_copy_in_stream, communication.all_gather_stream):
                stream.wait_event(gathered.event)
            communication.all_gather_state = None
        communication.post_forward_order.clear()
        # PyTorch 2.13 made a list of it. What it reduces must stay until the device has read it.
        many = hasattr(communication, "reduce_scatter_states")
        reduced = list(communication.reduce_scatter_states) if many else [communication.reduce_scatter_state]
        for one in filter(None, reduced):
            if one.event is not None:
                state._device_handle.current_stream().wait_event(one.event)
        if many:
            communication.reduce_scatter_states.clear()
        else:
            communication.reduce_scatter_state = None
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
    return bool(states)


def _discard(group: Any) -> None:
    group._partial_reduce_output = None
    for holder, name in _kept(group):
        setattr(holder, name, None)


def _is_unreduced(group: Any) -> bool:
    sums = getattr(group, "_partial_reduce_output", None)
    return sums is not None or any(getattr(holder, name, None) is not None for holder, name in _kept(group))


def _kept(group: Any) -> Iterator[tuple[Any, str]]:
    """Yields objects and attributes in which FSDP2 keeps whole gradients of the group's parameters."""
    for parameter in group.fsdp_params:
        yield parameter, "unsharded_accumulated_grad"
        if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
            yield whole, "grad"
