"""Trainers that shard by Accelerate: dmuon takes over a model and an optimizer that Accelerate has prepared."""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from typing import Any, NoReturn

import torch.nn as nn

from dmuon._running.moved_scheduler import check_movable, move_scheduler
from dmuon._running.muon import Muon
from dmuon._setup.dedication import dedicate_params, dedication_of
from dmuon._setup.routing import DEDICATION
from dmuon._setup.shown import shown
from dmuon._setup.wrappers import unwrapped

logger = logging.getLogger("dmuon")
_RATES = (
    "dmuon: prepare: the optimizer in whose place dmuon.Muon comes has groups with rates of their own, which count no "
    "more. Give these to prepare as adamw_groups or muon_groups, if you want them."
)
_ORDER = "model, optimizer, ... = accelerator.prepare(model, optimizer, ...), then dmuon.prepare, then the first step"

# By model: the options of `dedicate_params` with which the last call has dedicated it.
_dedicated: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


def prepare(
    accelerator: Any, model: nn.Module, optimizer: Any = None, scheduler: Any = None, **options: Any
) -> tuple[nn.Module, Any, Any]:
    """Gives the matrices of a model that Accelerate has sharded to Muon, and its optimizer's place to `dmuon.Muon`.

        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
        model, optimizer, scheduler = dmuon.prepare(accelerator, model, optimizer, scheduler, lr=2e-2, adamw_lr=3e-4)

    Calls `dedicate_params` and `Muon`, with the mesh and the policy of Accelerate's `fully_shard`. Everything else is
    the trainer's: clipping, accumulation, `save_state`, `load_state`, `get_state_dict`. Lightning, and trainers that
    shard by themselves, need no such call. Collective over the mesh. Call it before the first forward and before a
    checkpoint is loaded.

    Args:
        accelerator: an Accelerator whose FullyShardedDataParallelPlugin has `fsdp_version=2`. Or one of a single
            process, which has none.
        model: the model that `accelerator.prepare` returned.
        optimizer: the optimizer that `accelerator.prepare` returned. It may be of any class, because its parameters and
            options count no more, and whoever goes on with it gets an error; with a scheduler its lr is not 0. None
            means the only one.
        scheduler: the scheduler that `accelerator.prepare` returned. It goes on with Muon's rates, in the same shape.
            It must have made no step, and be of a class that multiplies a group's own rate, such as LambdaLR (which
            Transformers' schedulers are). Or a function that makes a scheduler of an optimizer. None: there is none
            yet, as in Transformers' Trainer.
        options: of `dedicate_params` (except `mesh`) and of `Muon`.

    Returns:
        The model, the optimizer and the scheduler to go on with: the objects of `accelerator.prepare`.

    Raises:
        ValueError: the accelerator does not shard by FSDP2, has not prepared the model, the optimizer or the scheduler,
            or they have made a step; an option is of neither function; or as `dedicate_params` and `Muon` do.
    """
    _check_plugin(accelerator)
    of_dedication, of_muon = _split(options)
    prepared = _prepared_optimizer(accelerator, model, optimizer)
    if scheduler is not None and not callable(scheduler):
        _check_scheduler(accelerator, scheduler, prepared)

    if of_dedication != _dedicated.get(unwrapped(model)):
        dedicate_params(model, **of_dedication)
        _dedicated[unwrapped(model)] = of_dedication
    # A function of the user's may raise below. Then the next call goes on with this Muon.
    earlier, muon = vars(prepared).get("_dmuon", (None, None))
    if muon is None or earlier != of_muon:
        muon = Muon(model, **of_muon)
    prepared._dmuon = of_muon, muon
    old, made = prepared.optimizer, None
    if callable(scheduler):  # no scheduler can be called
        made = scheduler(muon)
        accelerator._schedulers = [s for s in accelerator._schedulers if _inner(s).optimizer not in (old, prepared)]
    elif scheduler is not None:
        move_scheduler(_inner(scheduler), old, muon)
    # Again, because the trainer and its scheduler hold this object. It also keeps the method of a scaled step, which a
    # scheduler has replaced by now.
    del prepared._dmuon
    prepared.__init__(muon, device_placement=False, scaler=prepared.scaler)
    _retire(old, speaks=dedication_of(model, "prepare").ranks.owner == 0)
    return model, prepared, scheduler if made is None else accelerator.prepare_scheduler(made)


def _retire(old: Any, speaks: bool) -> None:
    """Lets a use of the replaced optimizer raise: a scheduler of it, for example, would change no rate of Muon's."""
    kind = type(old)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueError(  # an AttributeError would ask the class's own __getattr__
            f"prepare: the trainer goes on with its {kind.__name__}, in whose place dmuon.prepare has "
            "put dmuon.Muon. Expected: the optimizer that prepare returns, also for a scheduler: "
            "super().create_scheduler(num_training_steps, self.optimizer) in Transformers' Trainer."
        )

    def shows(_: Any) -> str:
        return f"{kind.__name__} in whose place dmuon.Muon is"

    with contextlib.suppress(Exception):  # of any class, which may have groups of its own kind
        rates = [group.get("initial_lr", group.get("lr")) for group in old.param_groups]
        if speaks and any(rate != rates[0] for rate in rates):
            logger.warning(_RATES)
    replaced = {"param_groups": property(refuse), "step": refuse, "zero_grad": refuse, "__repr__": shows}
    with contextlib.suppress(Exception):  # some classes allow no other in their place
        old.__class__ = type(kind.__name__, (kind,), replaced)
    for name in replaced:  # a scheduler stores `step` on the instance
        vars(old).pop(name, None)


def _check_plugin(accelerator: Any) -> None:
    if not any(base.__name__ == "Accelerator" for base in type(accelerator).__mro__):
        raise ValueError(f"prepare: accelerator: expected an accelerate.Accelerator, got {shown(accelerator)}")
    state = accelerator.state
    kind = str(state.distributed_type).rpartition(".")[2]
    if kind == "NO":  # one process, where nothing is sharded
        return
    if kind != "FSDP":
        raise ValueError(
            "prepare: accelerator: expected one that shards, Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin("
            f"fsdp_version=2)) or `fsdp_version: 2` in its configuration, got distributed_type {state.distributed_type}"
            ". (On CPUs Accelerate ignores the plugin.) Or call dedicate_params, fully_shard and Muon yourself."
        )
    if (version := state.fsdp_plugin.fsdp_version) != 2:
        raise ValueError(f"prepare: accelerator: expected fsdp_version 2 in its FSDP plugin, got {version}")


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options of dedicate_params and those of Muon."""
    of_dedication = inspect.signature(dedicate_params).parameters.keys() - {"model", "mesh"}
    of_muon = inspect.signature(Muon.__init__).parameters.keys() - {"self", "model"}
    if unknown := sorted(options.keys() - of_dedication - of_muon):
        raise ValueError(
            f"prepare: options: expected those of dedicate_params (except mesh) and of Muon, got {unknown}"
        )
    return {k: v for k, v in options.items() if k in of_dedication}, {k: v for k, v in options.items() if k in of_muon}


def _prepared_optimizer(accelerator: Any, model: Any, optimizer: Any) -> Any:
    """Returns the AcceleratedOptimizer to exchange."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"prepare: model: expected the model of accelerator.prepare, got {shown(model)}")
    plain = unwrapped(model)
    if not any(unwrapped(known) is plain for known in accelerator._models):
        got = "another model" if accelerator._models else "a model before accelerator.prepare"
        raise ValueError(f"prepare: model: expected the model of accelerator.prepare, got {got}. Expected: {_ORDER}.")
    known = accelerator._optimizers
    fitting = [o for o in known if optimizer is None or optimizer in (o, o.optimizer)]
    if len(fitting) != 1:
        got = f"one of {len(known)}" if optimizer is None else f"an unprepared {type(optimizer).__name__}"
        raise ValueError(f"prepare: optimizer: expected that of accelerator.prepare, got {got}. Expected: {_ORDER}.")
    prepared = fitting[0]
    # Muon, or a function of the user's, raised in the last call.
    began = (plain in _dedicated and dedication_of(plain, "prepare").runtime is None) or "_dmuon" in vars(prepared)
    if DEDICATION in vars(plain) and not began:
        raise ValueError(
            "prepare: model: dedicate_params was called on it already. Expected: prepare alone, once, which calls "
            "dedicate_params and Muon itself. A trainer's second train(), also by auto_find_batch_size, needs a new "
            "model and trainer."
        )
    if prepared.optimizer.state:
        raise ValueError(
            "prepare: optimizer: expected one without state, got one that was stepped, or loaded. Expected: "
            f"{_ORDER}. Load a checkpoint after dmuon.prepare."
        )
    return prepared


def _check_scheduler(accelerator: Any, scheduler: Any, prepared: Any) -> None:
    if scheduler not in accelerator._schedulers:
        raise ValueError(
            "prepare: scheduler: expected that of accelerator.prepare, or a function that makes one of an optimizer, "
            f"got an unprepared {type(scheduler).__name__}"
        )
    if _inner(scheduler).optimizer not in (prepared, prepared.optimizer):
        raise ValueError("prepare: scheduler: expected a scheduler of `optimizer`, got one of another optimizer")
    check_movable(_inner(scheduler), prepared.optimizer)


def _inner(scheduler: Any) -> Any:
    """Returns the scheduler inside of Accelerate's wrapper."""
    return getattr(scheduler, "scheduler", scheduler)
