"""By what gradients are divided: FSDP2 and dmuon must agree, or one clipping would join gradients of two sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from dmuon._setup.place import clean_name
from dmuon._setup.sharded import param_groups


def problem_of_factors(model: nn.Module, modules: Sequence[FSDPModule], ours: float, untold: float) -> str | None:
    """What to say of the first module that trains and divides by something else than `ours`, None if there is none.

    Costs a look at each module, so that every step can ask: `set_gradient_divide_factor` may be called any time. Of
    what else changes FSDP2's reduction, `set_force_sum_reduction_for_comms` only divides after a sum instead of within
    it, which changes no value; and what `set_all_reduce_hook` or a custom reduce-scatter do to values nobody can know.

    Args:
        model: for names.
        modules: of it, under fully_shard.
        ours: what dmuon divides the sum over all ranks by.
        untold: what a module divides by that was told nothing.
    """
    for module in modules:
        for group in param_groups(module._get_fsdp_state()):
            told = getattr(group, "gradient_divide_factor", None)
            theirs = untold if told is None else told
            if theirs != ours and any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params):
                name = next(clean_name(path) for path, other in model.named_modules() if other is module)
                return (
                    f"dmuon: fully_shard divides the gradients of '{name or '(root)'}' by {theirs:.17g}, and dmuon "
                    f"those of matrices by {ours:.17g}. Expected: "
                    f"dedicate_params(gradient_divide_factor={theirs:.17g}) if FSDP2's is meant, else "
                    f"set_gradient_divide_factor({ours:.17g}) on every module under fully_shard."
                )
    return None
