"""Checks the divisor of gradients, which must be one for FSDP2 and dmuon: clipping joins their gradients' norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from dmuon._setup.sharded import name_of, param_groups


def problem_of_factors(model: nn.Module, modules: Sequence[FSDPModule], ours: float, unset: float) -> str | None:
    """Returns an error about the first module that trains and has another divisor than `ours`, or None.

    Reads one attribute of each module, so every step can afford it: users may call `set_gradient_divide_factor` at any
    time. Two other settings of FSDP2's reduction are not checked. `set_force_sum_reduction_for_comms` changes no value:
    FSDP2 only divides after the sum. The effect of `set_all_reduce_hook` or a custom reduce-scatter cannot be known.

    Args:
        model: the model, for names.
        modules: its modules under fully_shard.
        ours: dmuon's divisor of the sum over all ranks.
        unset: the divisor of a module for which the user has set none.
    """
    for module in modules:
        for group in param_groups(module._get_fsdp_state()):
            told = getattr(group, "gradient_divide_factor", None)
            theirs = unset if told is None else told
            if theirs != ours and any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params):
                return (
                    f"dmuon: fully_shard divides the gradients of '{name_of(module, model)}' by {theirs:.17g}, and "
                    f"dmuon those of matrices by {ours:.17g}. Expected: "
                    f"dedicate_params(gradient_divide_factor={theirs:.17g}) if FSDP2's is meant, else "
                    f"set_gradient_divide_factor({ours:.17g}) on every module under fully_shard."
                )
    return None
