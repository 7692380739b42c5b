"""What `dedicate_params` is told of schedule and plan: the place of each option's default, and what is a good value."""

from __future__ import annotations

import dataclasses
import os

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from dmuon import _plan
from dmuon._setup.strategies import require_strategy

_STEP = _plan.StepOptions()
_PLAN = _plan.PlanOptions()
_MOST_UNITS = 10**6  # more would leave the engine's integers


@dataclasses.dataclass
class Schedule:
    """When messages go out; see `dedicate_params`. The fields after the first four are for ablations."""

    node_copy: bool = _STEP.node_copy
    lookahead: int = _STEP.lookahead
    max_units_in_flight: int | None = None
    reshard_after_forward: bool | None = _STEP.reshard_after_forward
    broadcast_before_reduce: bool = _STEP.broadcast_before_reduce
    asynchronous: bool = _STEP.asynchronous
    one_stage: bool = False  # all ranks as one node

    def native(self) -> _plan.StepOptions:
        """For the engine and the planner."""
        options = _plan.StepOptions()
        options.node_copy = self.node_copy
        options.lookahead = self.lookahead
        options.max_units_in_flight = self.max_units_in_flight or 0
        options.reshard_after_forward = self.reshard_after_forward is not False
        options.broadcast_before_reduce = self.broadcast_before_reduce
        options.asynchronous = self.asynchronous
        return options

    def check(self) -> None:
        """Raises a ValueError that names the first bad option of `dedicate_params`."""
        if not isinstance(self.node_copy, bool):
            raise ValueError(f"dedicate_params: node_copy: expected True or False, got {self.node_copy!r}")
        for name, least, or_none in (("lookahead", 0, ""), ("max_units_in_flight", 2, " or None")):
            value = getattr(self, name)
            if value is None and or_none:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST_UNITS:
                raise ValueError(
                    f"dedicate_params: {name}: expected a number of units, {least} or more{or_none}, got {value!r}"
                )


@dataclasses.dataclass
class Planning:
    """How owners are chosen; see `dedicate_params`."""

    strategy: str = "load_balance"
    plan: str | os.PathLike[str] | None = None
    costs: str | os.PathLike[str] = "measured"
    layout_slack: float = _PLAN.layout_slack
    max_memory_bytes: int | None = None
    batching: bool = True  # False, for ablations: every matrix alone

    def native(self, schedule: Schedule, weight_bytes: int, gradient_bytes: int) -> _plan.PlanOptions:
        """For the planner.

        Args:
            schedule: what runs by the plan.
            weight_bytes: of an element in the compute dtype.
            gradient_bytes: of an element of gradients as they travel.
        """
        options = _plan.PlanOptions(schedule.native())
        options.layout_slack = self.layout_slack
        options.max_memory_bytes = self.max_memory_bytes or 0
        options.weight_bytes, options.gradient_bytes = weight_bytes, gradient_bytes
        return options

    def check(self) -> None:
        """Raises a ValueError that names the first bad option of `dedicate_params`."""
        require_strategy(self.strategy, "dedicate_params")
        if self.plan is not None:
            require_path(self.plan, "dedicate_params: plan")
        require_path(self.costs, "dedicate_params: costs")
        slack, most = self.layout_slack, self.max_memory_bytes
        if isinstance(slack, bool) or not isinstance(slack, int | float) or not 0 <= slack <= 1:
            raise ValueError(f"dedicate_params: layout_slack: expected a number in [0, 1], got {slack!r}")
        if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 0 < most < 2**62):
            raise ValueError(f"dedicate_params: max_memory_bytes: expected a positive int or None, got {most!r}")


def check_as_for_fully_shard(mp_policy: MixedPrecisionPolicy | None, reshard_after_forward: bool | None) -> None:
    """Raises a ValueError that names the first bad one of the options that `fully_shard` has too."""
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ValueError(
            "dedicate_params: mp_policy: expected torch.distributed.fsdp.MixedPrecisionPolicy or None, got "
            f"{type(mp_policy).__name__}"
        )
    for name in ("param_dtype", "reduce_dtype") if mp_policy is not None else ():
        dtype = getattr(mp_policy, name)
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"dedicate_params: mp_policy.{name}: expected float32, bfloat16, float16 or None, got {dtype}"
            )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            "dedicate_params: reshard_after_forward: expected True, False or None; resharding to a smaller world "
            f"size (an int) has no meaning for owned matrices; got {reshard_after_forward!r}"
        )


def require_path(value: object, argument: str) -> None:
    """Raises a ValueError that names `argument`, unless the value may be a path."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{argument}: expected a path, got {value!r}")
