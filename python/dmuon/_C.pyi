"""The C++ engine; its headers under src/dmuon say what each call does."""

import enum
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dmuon import _plan

Row = tuple[float, float, float]

def orthogonalize(
    x: torch.Tensor,
    coefficients: str | Sequence[Row],
    num_steps: int,
    eps: float,
    dtype: torch.dtype | None,
) -> torch.Tensor: ...
def default_ns_dtype(device: torch.device) -> torch.dtype: ...
def resolve_coefficients(coefficients: str | Sequence[Row], num_steps: int) -> list[Row]: ...

class Options:
    device: torch.device
    host_replicates: int
    step: _plan.StepOptions

class Group:
    def __init__(self, group: dist.ProcessGroup | None, name: str, rank: int, size: int) -> None: ...

class SharedMesh:
    def __init__(self, row: Group, column: Group, order: Group, verdict: Group) -> None: ...
    def leave(self, grace_ms: int) -> None: ...

class UnitSpec:
    def __init__(self, name: str, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None: ...

class HostNorms:
    def __init__(self, sharded: float, replicated: float) -> None: ...

class Verdict:
    finite: bool
    has_gradient: list[bool]
    squared_norms: list[float]
    host_squared_norm: float

class Moment(enum.Enum):
    BEFORE_USE = 0
    AFTER_FORWARD = 1
    AFTER_BACKWARD = 2

class Pass(enum.Enum):
    TRAIN_FORWARD = 0
    EVAL_FORWARD = 1
    BACKWARD = 2

class Trigger:
    moment: Moment
    unit: int

class Dependency:
    kind: str
    unit: int

class Operation:
    kind: str
    lane: str
    unit: int
    batch: int
    version: int
    after: list[Dependency]

class Message:
    group: str
    root: int
    bytes: int

class Layout: ...

class Event(enum.Enum):
    TRAIN_FORWARD = 0
    EVALUATION = 1
    BACKWARD = 2
    BACKWARD_NO_SYNC = 3
    STEP = 4

class Job:
    def __init__(
        self,
        layout: Layout,
        options: _plan.StepOptions,
        forward: Sequence[Trigger],
        backward: Sequence[Trigger],
        batches: Sequence[Sequence[Sequence[int]]],
        events: Sequence[Event],
    ) -> None: ...

class Issue:
    operation: Operation
    event: int
    trigger: Trigger | None

class Program:
    issues: list[Issue]

class Costs:
    def __init__(
        self,
        forward_us: float,
        backward_us: float,
        update_us: float,
        row_us_per_byte: float,
        column_us_per_byte: float,
    ) -> None: ...

class SimulatedSpan:
    issue: int
    issued_us: float
    start_us: float
    end_us: float

class DryRun:
    violations: list[str]
    timeline: list[list[SimulatedSpan]]
    peak_bytes: int

def unroll(job: Job) -> list[Program]: ...
def dry_run(job: Job, costs: Costs) -> DryRun: ...

class Engine:
    def __init__(self, options: Options, mesh: SharedMesh, plan: _plan.Plan, units: list[UnitSpec]) -> None: ...
    def weights(self, unit: int) -> list[torch.Tensor]: ...
    def packed_order(self, unit: int) -> list[int]: ...
    def bind(self, unit: int, parameters: Sequence[torch.Tensor]) -> None: ...
    def set_placeholders(self, placeholders: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None: ...
    def begin_forward(self) -> None: ...
    def before_forward(self, unit: int) -> None: ...
    def after_forward(self, unit: int) -> None: ...
    def watch_inputs(self, unit: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]: ...
    def watch_outputs(self, unit: int, outputs: list[torch.Tensor]) -> None: ...
    def watch_root_outputs(self, outputs: list[torch.Tensor]) -> None: ...
    def agree(self, host: HostNorms, settings: int) -> Verdict: ...
    def agreed(self) -> bool: ...
    def forget_verdict(self) -> None: ...
    def scale_gradients(self, factor: float) -> None: ...
    def publish(self) -> None: ...
    def clear_gradient(self, parameter: int) -> None: ...
    def drain(self) -> None: ...
    def settle(self) -> None: ...
    def settle_step(self) -> None: ...
    def owned(self, parameter: int, name: str) -> torch.Tensor | None: ...
    def gather(self, parameter: int, name: str) -> torch.Tensor: ...
    def scatter(self, parameter: int, name: str, value: torch.Tensor) -> None: ...
    def unshard(self, unit: int) -> None: ...
    def reshard(self, unit: int) -> None: ...
    def route(self, unit: int) -> None: ...
    def put_gradient(self, parameter: int, value: torch.Tensor) -> None: ...
    def ready(self, unit: int) -> bool: ...
    def set_sync(self, sync: bool) -> None: ...
    def holds_partial_sums(self) -> bool: ...
    def layout(self) -> Layout: ...
    def trace(self, of_pass: Pass) -> list[Trigger]: ...
    def messages_of(self, operation: Operation, slot: int) -> list[Message]: ...
    def start_profile(self) -> None: ...
    def stop_profile(self) -> list[tuple[str, str, int, float, float, float]]: ...
    def statistics(self) -> dict[str, float]: ...
    def reset_peak(self) -> None: ...

class MuonGroup:
    def __init__(
        self,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        coefficients: Sequence[Row],
        eps: float,
        adjust_lr_fn: str,
        ns_dtype: torch.dtype,
    ) -> None: ...

class MuonState:
    def __init__(self, engine: Engine) -> None: ...
    def step(self, groups: list[MuonGroup], group_of: list[int]) -> None: ...

def muon_update(master: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, group: MuonGroup) -> None: ...
def in_backward() -> bool: ...
