"""The words of placeholders' errors: the reason and the way out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

WAYS_OUT = (
    "Read or change weights inside `with dmuon.full_params(model, writeback=...)`; copy by model.state_dict(), and "
    "states by optimizer.state_dict(); average by dmuon.Ema(model); clip with dmuon.clip_grad_norm_(model, max_norm); "
    "train with dmuon.Muon(model)."
)
AT_OWNER = f"this weight is whole only at its owner. {WAYS_OUT}"
GRADIENT_AT_OWNER = (
    "this gradient is whole only at its owner. Clip by dmuon.clip_grad_norm_(model, max_norm); read norms by "
    "dmuon.grad_norms(model); scale it in place by a number, as grad.mul_(0.5); drop it by `parameter.grad = None`. A "
    "step whose gradients are not finite is skipped by itself: optimizer.skipped_steps."
)
HOOK_AT_OWNER = (
    "its gradient is summed up at its owner, so the hook would never run. Expected: a hook of a module, as "
    "register_full_backward_hook; or a matrix that `select` of dedicate_params leaves to AdamW."
)
STATE_AT_OWNER = (
    "this state is whole only at its owner. Read it by optimizer.state_dict(); change it by "
    "optimizer.load_state_dict(...), or let it begin anew by `del optimizer.state[parameter]`, on all ranks."
)
OUTSIDE = (
    "it was used outside of the model's modules, and its values are here inside of their calls alone. Expected: its "
    "use inside of the forward of the model or of a module of it. To look at it: `with dmuon.full_params(model):`. To "
    "average weights: dmuon.Ema(model)."
)
BETWEEN = (
    "between dedicate_params and Muon no module holds its matrices. Expected: parallelize_module, then initialise and "
    "load weights, before dedicate_params; or load after Muon; of a model on the meta device, parallelize_module, "
    "dedicate_params, fully_shard, then model.to_empty(device=...), then its initialisation, then Muon."
)
IN_PLACE_OF_DDP = "the model without it; in its place dmuon.dedicate_params(model, mesh, replicated=True)"
_OF_CALLERS = {  # modules and functions that call with a placeholder, and what to do
    "torch.nn.parallel.distributed": f"DistributedDataParallel would copy it. Expected: {IN_PLACE_OF_DDP}.",
    "torch.distributed.fsdp._fully_shard._fsdp_param": (  # on a module around the model
        "it is whole only at its owner by now. Expected: fully_shard before dmuon.Muon."
    ),
    "torch.nn.utils.clip_grad.clip_grad_value_": (
        "torch.nn.utils.clip_grad_value_ would clip each element of a gradient, which is whole only at its owner. "
        "Expected: dmuon.clip_grad_norm_(model, max_norm)."
    ),
    "torch.nn.utils.convert_parameters": (
        "parameters_to_vector and vector_to_parameters read and write whole weights. Expected: them inside of `with "
        "dmuon.full_params(model, writeback=True)`."
    ),
    "torch.distributed.pipelining._backward": (
        "this schedule computes gradients of weights apart from those of inputs, as zero-bubble schedules do. "
        "Expected: ScheduleGPipe, Schedule1F1B, ScheduleLoopedBFS or ScheduleInterleaved1F1B."
    ),
}


def of_caller() -> str:
    """Returns the way out for the innermost caller that `_OF_CALLERS` knows; empty if it knows none."""
    known = (_OF_CALLERS.get(f"{module}.{function}") or _OF_CALLERS.get(module) for module, function in _callers())
    return next(filter(None, known), "")


def in_functional_call() -> bool:
    """True if torch.func.functional_call, with parameters of its own, is among the callers."""
    return any(module == "torch.nn.utils.stateless" for module, _ in _callers())


def _callers() -> Iterator[tuple[str, str]]:
    """Yields module and function of each caller, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        frame = frame.f_back
