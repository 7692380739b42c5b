"""The words of placeholders' errors: the reason and the way out."""

from __future__ import annotations

import sys

WAYS_OUT = (
    "Read or change weights inside `with dmuon.full_params(model, writeback=...)`; copy by model.state_dict(); average "
    "by dmuon.Ema(model); clip with dmuon.clip_grad_norm_(model, max_norm); train with dmuon.Muon(model)."
)
AT_OWNER = f"this weight is whole only at its owner. {WAYS_OUT}"
OUTSIDE = (
    "it was used outside of the model's modules, and its values are here inside of their calls alone. Expected: its "
    "use inside of the forward of the model or of a module of it. To look at it: `with dmuon.full_params(model):`. To "
    "average weights: dmuon.Ema(model)."
)
BETWEEN = (
    "between dedicate_params and Muon no module holds its matrices. Expected: initialise and load weights before "
    "dedicate_params, or after Muon; of a model on the meta device, first fully_shard, then "
    "model.to_empty(device=...), then its initialisation, then Muon."
)
_OF_CALLERS = {  # modules that call with a placeholder, and what to do
    "torch.nn.parallel.distributed": (
        "DistributedDataParallel would copy it. Expected: the model without it, because dmuon averages gradients."
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param": (
        "it is whole only at its owner by now. Expected: fully_shard before dmuon.Muon."
    ),
    "torch.distributed.pipelining._backward": (
        "this schedule computes gradients of weights apart from those of inputs, as zero-bubble schedules do. "
        "Expected: ScheduleGPipe, Schedule1F1B, ScheduleLoopedBFS or ScheduleInterleaved1F1B."
    ),
}


def of_caller() -> str:
    """Returns the way out for the innermost caller that `_OF_CALLERS` knows; empty if it knows none."""
    frame = sys._getframe(1)
    while frame is not None:
        if (way_out := _OF_CALLERS.get(frame.f_globals.get("__name__", ""))) is not None:
            return way_out
        frame = frame.f_back  # type: ignore[assignment]
    return ""
