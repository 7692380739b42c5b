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
        options.max_units_in_flight = self.max_units_in_flight or 0
        options.reshard_after_forward = self.reshard_after_forward is not False
        for name in ("node_copy", "lookahead", "broadcast_before_reduce", "asynchronous"):
            setattr(options, name, getattr(self, name))
        return options

    def check(self) -> None:
        """Raises a ValueError that names the first bad option of `dedicate_params`."""
        _require(isinstance(self.node_copy, bool), "node_copy", "True or False", self.node_copy)
        _require(_is_int(self.lookahead, 0, _MOST_UNITS), "lookahead", "a number of units, 0 or more", self.lookahead)
        units = self.max_units_in_flight
        good = units is None or _is_int(units, 2, _MOST_UNITS)
        _require(good, "max_units_in_flight", "a number of units, 2 or more or None", units)


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
        good = isinstance(slack, int | float) and not isinstance(slack, bool) and 0 <= slack <= 1
        _require(good, "layout_slack", "a number in [0, 1]", slack)
        good = most is None or _is_int(most, 1, 2**62 - 1)
        _require(good, "max_memory_bytes", "a positive int or None", most)


def check_as_for_fully_shard(mp_policy: MixedPrecisionPolicy | None, reshard_after_forward: bool | None) -> None:
    """Raises a ValueError that names the first bad one of the options that `fully_shard` has too."""
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


def _require(good: bool, argument: str, expected: str, got: object) -> None:
    if not good:
        raise ValueError(f"dedicate_params: {argument}: expected {expected}, got {got!r}")


def _is_int(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def require_path(value: object, argument: str) -> None:
    """Raises a ValueError that names `argument`, unless the value may be a path."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{argument}: expected a path, got {value!r}")
