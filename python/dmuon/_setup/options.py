"""What dedicate_params was told of schedule and plan."""

from __future__ import annotations

import dataclasses
import os

from dmuon import _C


@dataclasses.dataclass
class Schedule:
    """When messages go out; see `dedicate_params`. The fields after the first three are for ablations."""

    node_copy: bool = True
    lookahead: int = 2
    max_units_in_flight: int | None = None
    broadcast_before_reduce: bool = True  # in a backward: the next unit's weights before this one's gradients
    asynchronous: bool = True  # step() returns while weights travel
    one_stage: bool = False  # all ranks as one node

    def native(self) -> _C.ScheduleOptions:
        """For the engine."""
        options = _C.ScheduleOptions()
        options.node_copy = self.node_copy
        options.lookahead = self.lookahead
        options.max_units_in_flight = self.max_units_in_flight or 0
        options.broadcast_before_reduce = self.broadcast_before_reduce
        options.asynchronous = self.asynchronous
        return options


@dataclasses.dataclass
class Planning:
    """How owners are chosen; see `dedicate_params`."""

    strategy: str = "load_balance"
    plan: str | os.PathLike[str] | None = None
    costs: str | os.PathLike[str] = "measured"
    layout_slack: float = 0.03
    max_memory_bytes: int | None = None
    batching: bool = True  # False, for ablations: every matrix alone


def require_path(value: object, argument: str) -> None:
    """Raises a ValueError that names `argument`, unless the value may be a path."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{argument}: expected a path, got {value!r}")
