"""The first call: takes matrices out of a model, so that fully_shard does not see them."""

from __future__ import annotations

import dataclasses
import datetime
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from dmuon import _C
from dmuon._setup import ranks
from dmuon._setup.options import Planning, Schedule, require_path
from dmuon._setup.routing import DEDICATION, SENTINEL, Matrix, RoutingTable, Select, route
from dmuon._setup.strategies import require_strategy

if TYPE_CHECKING:
    from dmuon._running.runtime import Runtime

_MOST_UNITS = 10**6  # more would leave the engine's integers


@dataclasses.dataclass
class Dedication:
    """What dedicate_params remembers of a model until Muon, and Muon for as long as the model lives."""

    ranks: ranks.Ranks
    matrices: list[Matrix]
    table: RoutingTable
    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool
    planning: Planning
    schedule: Schedule
    known: dict[nn.Module, list[str]]  # every module, and its parameters in their order, as they were
    groups: _C.Groups | None = None
    guards: list[Any] = dataclasses.field(default_factory=list)  # handles of hooks that forbid early use
    runtime: Runtime | None = None


def plain_module(model: nn.Module, function: str) -> nn.Module:
    """The module under torch.compile's wrapper.

    Raises:
        ValueError: it is none; names `function`.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"{function}: model: expected a torch.nn.Module, got {type(model).__name__}")
    return getattr(model, "_orig_mod", model)


def dedication_of(model: nn.Module, function: str) -> Dedication:
    """What is known of a model.

    Raises:
        ValueError: dedicate_params was not called on it; names `function`.
    """
    found: Dedication | None = plain_module(model, function).__dict__.get(DEDICATION)
    if found is None:
        raise ValueError(
            f"{function}: model: expected a model on which dmuon.dedicate_params(model, ...) was called (the same "
            f"module object), got {type(model).__name__} without"
        )
    return found


def is_dedicated(model: nn.Module) -> bool:
    """Whether dedicate_params was called on it."""
    return DEDICATION in model.__dict__


def runtime_of(model: nn.Module, function: str) -> Runtime:
    """The running engine of a model.

    Raises:
        ValueError: dedicate_params or Muon was not called on it; names `function`.
    """
    runtime = dedication_of(model, function).runtime
    if runtime is None:
        raise ValueError(f"{function}: model: expected a model with dmuon.Muon(model), got one without")
    return runtime


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = True,
    select: Select | None = None,
    strategy: str = "load_balance",
    plan: str | os.PathLike[str] | None = None,
    costs: str | os.PathLike[str] = "measured",
    layout_slack: float = 0.03,
    max_memory_bytes: int | None = None,
    node_copy: bool = True,
    lookahead: int = 2,
    max_units_in_flight: int | None = None,
    timeout: datetime.timedelta | None = None,
) -> RoutingTable:
    """Gives every weight matrix of `model` to Muon; call it before `fully_shard`, then `dmuon.Muon(model)`.

    Muon gets every trainable 2-D weight that is not an embedding, not tied to one and not the output head.
    The rest stays with the host framework and AdamW. Collective over the mesh; no forward may
    run before `Muon`.

    Args:
        model: on its device or on the CPU, initialised alike on all ranks; fp32, bf16 or fp16 matrices.
        mesh: as for `fully_shard`: 1-D (shard) or 2-D (replicate, shard). None: all ranks, or one
            device where no process group exists.
        mp_policy: as for `fully_shard`; the same one.
        reshard_after_forward: free a unit's matrices between its forward and backward. None means True.
        select: `select(name, module, parameter)` returns True (Muon), False (AdamW) or None (by the rule).
        strategy: how owners are chosen: "load_balance", or for comparison "milp" (the paper's formulation, needs
            SciPy), "lpt", "round_robin", "xor_layout", "rank0".
        plan: the file of a saved plan for this model and mesh, instead of strategy, costs and layout_slack.
        costs: what the plan is made of: "measured" on these ranks when `Muon` is made and kept in the user's cache,
            "modelled", or the file of a table.
        layout_slack: share of the makespan that may be given up so that matrices used one after the other have
            owners in different columns.
        max_memory_bytes: that no rank may exceed, as the plan counts them; None: no limit.
        node_copy: with several nodes, keep what came from other nodes until the weights change, as HSDP
            does, so that a step moves each weight between nodes once.
        lookahead: how many units ahead of their use weights travel between nodes; 0 sends everything when it is
            needed. With 1 or more, a unit's weights also travel inside the node while the one before computes.
        max_units_in_flight: the most units whose packed weights or gradients may be in memory at once, 2 or more;
            None: lookahead + 2.
        timeout: of dmuon's process groups; None: PyTorch's default for a new group (30 minutes on gloo).

    Returns:
        The routing table; print it.

    Raises:
        ValueError: on every rank, if any rank finds something wrong or the ranks differ.
    """
    model = plain_module(model, "dedicate_params")
    device_type = ranks.default_device_type(list(model.parameters()))
    place, problem = ranks.resolve_ranks(mesh, device_type, _checked_timeout(timeout))
    matrices: list[Matrix] = []
    table = RoutingTable()
    schedule = Schedule(node_copy, lookahead, max_units_in_flight)
    planning = Planning(strategy, plan, costs, layout_slack, max_memory_bytes)
    cause: BaseException | None = None
    try:
        if problem is not None:
            raise ValueError(problem)
        _check_options(mp_policy, reshard_after_forward)
        _check_planning(planning)
        _check_schedule(schedule)
        matrices, table = route(model, select)
    except Exception as error:  # whatever it is (select() is the user's), the other ranks must hear of it
        problem = ranks.described(error)
        cause = error.__cause__ if isinstance(error, ValueError) else error  # ours says all itself
    policy = mp_policy or MixedPrecisionPolicy()
    options = (policy, reshard_after_forward, planning, schedule, timeout, place.rows)
    facts = [f"options {options}"]
    facts += [f"{row} {matrix_dtype}" for row, matrix_dtype in zip(table, _dtypes(model), strict=False)]
    ranks.agree_or_raise(place, "dedicate_params", problem, facts, cause)

    dedication = Dedication(
        place, matrices, table, policy, reshard_after_forward is not False, planning, schedule, known={}
    )
    _take_out(model, dedication)
    model.__dict__[DEDICATION] = dedication
    return table


def _dtypes(model: nn.Module) -> list[torch.dtype]:
    return [parameter.dtype for parameter in model.parameters()]


def _checked_timeout(timeout: datetime.timedelta | None) -> datetime.timedelta | None:
    if timeout is None or (isinstance(timeout, datetime.timedelta) and timeout.total_seconds() > 0):
        return timeout
    raise ValueError(f"dedicate_params: timeout: expected a positive datetime.timedelta or None, got {timeout!r}")


def _check_options(
    mp_policy: MixedPrecisionPolicy | None,
    reshard_after_forward: bool | None,
) -> None:
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


def _check_planning(planning: Planning) -> None:
    require_strategy(planning.strategy, "dedicate_params")
    if planning.plan is not None:
        require_path(planning.plan, "dedicate_params: plan")
    require_path(planning.costs, "dedicate_params: costs")
    slack, most = planning.layout_slack, planning.max_memory_bytes
    if isinstance(slack, bool) or not isinstance(slack, int | float) or not 0 <= slack <= 1:
        raise ValueError(f"dedicate_params: layout_slack: expected a number in [0, 1], got {slack!r}")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or not 0 < most < 2**62):
        raise ValueError(f"dedicate_params: max_memory_bytes: expected a positive int or None, got {most!r}")


def _check_schedule(schedule: Schedule) -> None:
    if not isinstance(schedule.node_copy, bool):
        raise ValueError(f"dedicate_params: node_copy: expected True or False, got {schedule.node_copy!r}")
    for name, least in (("lookahead", 0), ("max_units_in_flight", 2)):
        value = getattr(schedule, name)
        if value is None and name == "max_units_in_flight":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST_UNITS:
            raise ValueError(
                f"dedicate_params: {name}: expected a number of units, {least} or more"
                f"{' or None' if name != 'lookahead' else ''}, got {value!r}"
            )


def _take_out(model: nn.Module, dedication: Dedication) -> None:
    """Removes the matrices and guards the model until Muon puts placeholders in their places."""

    def refuse_forward(module: nn.Module, args: Any) -> None:
        raise ValueError(
            "dedicate_params: a forward ran between dedicate_params and Muon. Expected: dedicate_params(model), "
            "fully_shard, dmuon.Muon(model), then the first forward."
        )

    def refuse_state(module: nn.Module, *_: Any) -> None:
        raise ValueError(
            "dedicate_params: a state dict was taken or loaded between dedicate_params and Muon. Expected: load "
            "weights before dedicate_params, or after Muon inside dmuon.full_params(model, writeback=True)."
        )

    holders = {module: None for matrix in dedication.matrices for _, module, _ in matrix.places}
    for module in model.modules():
        dedication.known[module] = [name for name, parameter in module._parameters.items() if parameter is not None]
    for module in holders:
        # Follows .to(), .double() and the like, which no longer reach the matrices; see check_sentinels.
        dtype = next(m.parameter.dtype for m in dedication.matrices for _, mod, _ in m.places if mod is module)
        device = next(m.parameter.device for m in dedication.matrices for _, mod, _ in m.places if mod is module)
        module.register_buffer(SENTINEL, torch.zeros((), dtype=dtype, device=device), persistent=False)
        dedication.guards += [
            module.register_state_dict_pre_hook(refuse_state),
            module.register_load_state_dict_pre_hook(refuse_state),
        ]
    for module in {model: None, **holders}:
        dedication.guards.append(module.register_forward_pre_hook(refuse_forward))
    for matrix in dedication.matrices:
        for _, module, attribute in matrix.places:
            del module._parameters[attribute]


def check_parameters(model: nn.Module, dedication: Dedication) -> None:
    """What came since dedicate_params would silently not be Muon's; what went would be trained nowhere.

    Raises:
        ValueError: a parameter was added, or the module of a matrix replaced. Wrappers around modules are no change.
    """
    modules = dict(model.named_modules())
    present = set(modules.values())
    whole = "after dedicate_params. Expected: the whole model, as it is trained, at dedicate_params."
    for matrix in dedication.matrices:
        for _, module, attribute in matrix.places:
            if module not in present or attribute in module._parameters:
                raise ValueError(f"Muon: model: '{matrix.name}' or its module was replaced or removed {whole}")
    for path, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and attribute not in dedication.known.get(module, ()):
                raise ValueError(f"Muon: model: '{path}{'.' * bool(path)}{attribute}' was added {whole}")


def check_sentinels(dedication: Dedication) -> torch.device | None:
    """Where the model has been moved to since dedicate_params.

    Returns:
        The device of the matrices, None if there are none.

    Raises:
        ValueError: the model was cast, or moved to the meta device, in between.
    """
    device = None
    for matrix in dedication.matrices:
        module = matrix.places[0][1]
        sentinel = module._buffers[SENTINEL]
        assert sentinel is not None
        device = sentinel.device
        if sentinel.dtype != matrix.parameter.dtype or sentinel.is_meta:
            raise ValueError(
                f"Muon: model: '{matrix.name}' was {matrix.parameter.dtype} on {matrix.parameter.device} at "
                f"dedicate_params, and its module has become {sentinel.dtype} on {sentinel.device}. Expected: cast "
                "the model before dedicate_params; mp_policy chooses the dtype of compute."
            )
    return device


def remove_guards(dedication: Dedication) -> None:
    """Ends the time between the two calls."""
    for handle in dedication.guards:
        handle.remove()
    dedication.guards.clear()
    for module in dedication.known:
        module._buffers.pop(SENTINEL, None)
        module._non_persistent_buffers_set.discard(SENTINEL)
