"""Options of `dedicate_params` for schedule, ranks and plan: defaults and checks."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from dmuon import _plan
from dmuon._setup.option_values import (
    real_number,
    require,
    require_late_updates,
    require_path,
    set_option,
    set_replicated,
)
from dmuon._setup.strategies import require_strategy

STEP = _plan.StepOptions()  # the engine's defaults
_PLAN = _plan.PlanOptions()
_FP32 = torch.finfo(torch.float32)
_require = functools.partial(require, "dedicate_params")
_set = functools.partial(set_option, "dedicate_params")


def step_options(
    node_copy: bool,
    lookahead: int,
    max_units_in_flight: int | None,
    reshard_after_forward: bool | None,
    late_updates: bool | None,
    replicated: bool = STEP.replicated,
) -> _plan.StepOptions:
    """Returns the options of a step for engine and planner, as `dedicate_params` got them.

    Raises:
        ValueError: names the first option of a wrong type. `Planning.check` checks ranges.
    """
    options = _plan.StepOptions()
    _set(options, "node_copy", node_copy)
    _set(options, "lookahead", lookahead)
    _set(options, "max_units_in_flight", max_units_in_flight, or_none=True)
    options.reshard_after_forward = reshard_after_forward is not False
    require_late_updates("dedicate_params", late_updates)
    options.late_updates = late_updates is True
    set_replicated("dedicate_params", options, replicated)
    return options


@dataclasses.dataclass(frozen=True)
class AcrossRanks:
    """Options for values that every rank has for itself; see `dedicate_params`."""

    sync_from_rank0: bool = False
    gradient_divide_factor: float | None = None
    broadcast_buffers: bool | None = None

    def divide_factor(self, num_ranks: int) -> float:
        """Returns the divisor of the sum of gradients over `num_ranks`."""
        return float(num_ranks if self.gradient_divide_factor is None else self.gradient_divide_factor)

    def facts(self) -> dict[str, Any]:
        """Returns the options, which must be equal on all ranks, without a tensor's device."""
        return {**vars(self), "gradient_divide_factor": real_number(self.gradient_divide_factor)}

    def check(self) -> None:
        """Raises a ValueError that names the first bad option of `dedicate_params`."""
        _require(isinstance(self.sync_from_rank0, bool), "sync_from_rank0", "True or False", self.sync_from_rank0)
        factor = self.gradient_divide_factor
        number = real_number(factor)
        good = factor is None or (number is not None and _FP32.tiny <= number <= _FP32.max)
        _require(good, "gradient_divide_factor", "a positive number that fp32 can hold, or None", factor)
        good = self.broadcast_buffers is None or isinstance(self.broadcast_buffers, bool)
        _require(good, "broadcast_buffers", "True, False or None", self.broadcast_buffers)


@dataclasses.dataclass
class Ablation:
    """Parts of dmuon that benchmarks switch off. Users have no option for them; no weight depends on them.

    Attributes:
        batching: False puts every matrix in a batch of its own.
        one_stage: True takes all ranks for one node, so that a matrix goes to every rank directly.
    """

    batching: bool = True
    one_stage: bool = False


@dataclasses.dataclass
class Planning:
    """Options for the choice of owners; see `dedicate_params`."""

    strategy: str = "load_balance"
    plan: str | os.PathLike[str] | None = None
    costs: str | os.PathLike[str] = "measured"
    layout_slack: float = _PLAN.layout_slack
    max_memory_bytes: int | None = None
    smallest_part: int = _plan.SMALLEST_PART  # elements of a part of a divided stack; tests set less

    def native(self, step: _plan.StepOptions) -> _plan.PlanOptions:
        """Returns the planner's options. The caller adds those that depend on model and device.

        Raises:
            ValueError: names the first option of a wrong type.
        """
        options = _plan.PlanOptions(step)
        _set(options, "layout_slack", self.layout_slack)
        _set(options, "max_memory_bytes", self.max_memory_bytes, or_none=True)
        return options

    def check(self, step: _plan.StepOptions) -> None:
        """Raises a ValueError that names the first bad option of `dedicate_params`, those of `step` included."""
        require_strategy(self.strategy, "dedicate_params")
        if self.plan is not None:
            require_path(self.plan, "dedicate_params: plan")
        require_path(self.costs, "dedicate_params: costs")
        self.native(step).validate("dedicate_params")


def check_as_for_fully_shard(mp_policy: MixedPrecisionPolicy | None, reshard_after_forward: bool | None) -> None:
    """Raises a ValueError that names the first bad option among those that `fully_shard` has too."""
    if mp_policy is not None:
        good = isinstance(mp_policy, MixedPrecisionPolicy)
        _require(good, "mp_policy", "torch.distributed.fsdp.MixedPrecisionPolicy or None", mp_policy)
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(mp_policy, name)
            good = dtype in (None, torch.float32, torch.bfloat16, torch.float16)
            _require(good, f"mp_policy.{name}", "float32, bfloat16, float16 or None", dtype)
    _require(
        reshard_after_forward is None or isinstance(reshard_after_forward, bool),
        "reshard_after_forward",
        "True, False or None (resharding to a smaller world size, an int, has no meaning for owned matrices)",
        reshard_after_forward,
    )


def dtypes_of(policy: MixedPrecisionPolicy, own: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes in which a leaf of dtype `own` computes, and in which its gradients are reduced."""
    compute = policy.param_dtype or own
    return compute, policy.reduce_dtype or compute
