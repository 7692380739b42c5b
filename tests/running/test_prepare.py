"""dmuon.prepare checks what Accelerate has prepared, and moves its scheduler to Muon's groups.

Stand-ins of Accelerate's classes; tests/examples trains by the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.optim import lr_scheduler

import dmuon


class AcceleratedOptimizer:
    def __init__(self, optimizer: Any, device_placement: bool = True, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        self.scaled_step = optimizer.step  # as Accelerate stores it for fp16


class AcceleratedScheduler:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler


class Accelerator:
    def __init__(self, distributed_type: str = "DistributedType.FSDP", fsdp_version: int = 2) -> None:
        plugin = SimpleNamespace(fsdp_version=fsdp_version)
        self.state = SimpleNamespace(distributed_type=distributed_type, fsdp_plugin=plugin)
        self._models: list[Any] = []
        self._optimizers: list[Any] = []
        self._schedulers: list[Any] = []

    def prepare(self, model: nn.Module, optimizer: Any, scheduler: Any = None) -> tuple[Any, Any, Any]:
        self._models.append(model)
        self._optimizers.append(AcceleratedOptimizer(optimizer))
        return model, self._optimizers[-1], scheduler and self.prepare_scheduler(scheduler)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        self._schedulers.append(AcceleratedScheduler(scheduler))
        return self._schedulers[-1]


def made(accelerator: Any, scheduler: Callable[[Any], Any] = lambda optimizer: None) -> tuple[Any, Any, Any]:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1:].parameters()}], lr=0.3)
    return accelerator.prepare(model, optimizer, scheduler(optimizer))


LRS = {"lr": 0.02, "adamw_lr": 0.003}
KINDS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: (step + 1) / 9),
    "warm up from 0": lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 9),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.PolynomialLR(o, 6)]
    ),
}


def rates(scheduler: Any, optimizer: Any) -> list[list[float]]:
    found = []
    for _ in range(6):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("error:.*optimizer.step:UserWarning")
@pytest.mark.parametrize("by_function", [False, True], ids=["moved", "made"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_scheduler_goes_on_with_the_rates_of_muon(kind, by_function):
    accelerator = Accelerator()
    model, optimizer, scheduler = made(accelerator, KINDS[kind])
    again = dmuon.prepare(accelerator, model, optimizer, KINDS[kind] if by_function else scheduler, **LRS)
    assert again[:2] == (model, optimizer) and isinstance(optimizer.optimizer, dmuon.Muon)
    assert optimizer.scaled_step == optimizer.optimizer.step  # as the scheduler has wrapped it
    assert accelerator._schedulers == [again[2]] and (by_function or again[2] is scheduler)
    plain = torch.optim.SGD([{"params": nn.Linear(1, 1).parameters(), "lr": lr} for lr in LRS.values()])
    expected = rates(KINDS[kind](plain), plain)
    got = rates(again[2].scheduler, optimizer.optimizer)
    assert [lr for lrs in got for lr in lrs] == pytest.approx([lr for lrs in expected for lr in lrs], rel=1e-12)


def test_options_reach_their_functions_and_one_process_needs_no_plugin():
    accelerator = Accelerator("DistributedType.NO")
    model, optimizer, _ = made(accelerator)
    dmuon.prepare(accelerator, model, select=lambda *_: False, adamw_lr=0.5)
    assert [(g["algorithm"], g["lr"]) for g in optimizer.optimizer.param_groups] == [("adamw", 0.5)]


def stepped(accelerator: Any) -> tuple[Any, Any]:
    model, optimizer, _ = made(accelerator)
    model(torch.arange(5)).sum().backward()
    optimizer.optimizer.step()
    return model, optimizer


def twice(accelerator: Any) -> tuple[Any, Any]:
    model, optimizer, _ = made(accelerator)
    dmuon.prepare(accelerator, model, optimizer)
    return model, optimizer


def late(optimizer: Any) -> Any:
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    return scheduler


def once(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, 10)


def apart(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5])


CASES: dict[str, tuple[Callable[[Any], Any], dict[str, Any], list[str]]] = {
    "no accelerator": (lambda _: (nn.Module(),), {"accelerator": 3}, ["accelerator: expected an accelerate.", "got 3"]),
    "ddp": (made, {"accelerator": Accelerator("DistributedType.MULTI_GPU")}, ["fsdp_version=2", "got distributed"]),
    "fsdp1": (made, {"accelerator": Accelerator(fsdp_version=1)}, ["expected fsdp_version 2", "got 1"]),
    "no model": (lambda a: (None,), {}, ["model: expected the model of accelerator.prepare, got None"]),
    "prepare not called": (lambda _: (nn.Linear(2, 2),), {}, ["got a model before accelerator.prepare", "then dmuon."]),
    "another model": (lambda a: made(a) and (nn.Linear(2, 2),), {}, ["got another model"]),
    "optimizer not prepared": (
        lambda a: (made(a)[0], torch.optim.SGD(nn.Linear(1, 1).parameters())), {}, ["got an unprepared SGD"],
    ),
    "two optimizers": (lambda a: (made(a)[0], made(a)[1])[:1], {}, ["optimizer: expected that of", "got one of 2"]),
    "stepped": (stepped, {}, ["got one that was stepped, or loaded", "then the first step"]),
    "twice": (twice, {}, ["dedicate_params was called on it already", "once"]),
    "unknown option": (lambda a: made(a)[:2], {"momentun": 1}, ["options: expected those", "got ['momentun']"]),
    "mesh": (lambda a: made(a)[:2], {"mesh": None}, ["(except mesh)", "got ['mesh']"]),
    "scheduler not prepared": (
        lambda a: (*made(a)[:2], KINDS["step"](made(a)[1].optimizer)), {}, ["scheduler: expected", "unprepared StepLR"],
    ),
    "scheduler of another": (lambda a: (*made(a)[:2], made(a, KINDS["step"])[2]), {}, ["of another optimizer"]),
    "late scheduler": (lambda a: made(a, late), {}, ["has made no step, got a StepLR after step 1"]),
    "one cycle": (lambda a: made(a, once), {}, ["got OneCycleLR", "scheduler=lambda optimizer:"]),
    "groups apart": (lambda a: made(a, apart), {}, ["one function for all groups", "scheduler=lambda optimizer:"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_order_is_refused_by_name_and_changes_nothing(case):
    arguments, options, words = CASES[case]
    accelerator = options.get("accelerator", Accelerator())
    given = arguments(accelerator)
    before = [o.optimizer for o in getattr(accelerator, "_optimizers", [])]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^prepare: ") as refused:
            dmuon.prepare(accelerator, *given, **{k: v for k, v in options.items() if k != "accelerator"})
        assert all(word in str(refused.value) for word in words), refused.value
    assert before == [o.optimizer for o in getattr(accelerator, "_optimizers", [])]


def test_a_function_that_raises_leaves_the_scheduler_of_before():
    accelerator = Accelerator()
    model, optimizer, scheduler = made(accelerator, KINDS["step"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mine"):
            dmuon.prepare(accelerator, model, optimizer, fail)
    assert accelerator._schedulers == [scheduler]
    _, prepared, _ = dmuon.prepare(accelerator, model, optimizer, KINDS["step"])
    assert type(prepared.optimizer) is dmuon.Muon and len(accelerator._schedulers) == 1
    with pytest.raises(ValueError, match="dedicate_params was called on it already"):
        dmuon.prepare(accelerator, model, optimizer)


def fail(_: Any) -> Any:
    raise RuntimeError("mine")


def test_whoever_goes_on_with_the_replaced_optimizer_gets_an_error():
    accelerator = Accelerator()
    model, optimizer, _ = made(accelerator)
    old = optimizer.optimizer
    dmuon.prepare(accelerator, model, optimizer, **LRS)
    assert repr(old) == "AdamW in whose place dmuon.Muon is"
    with pytest.raises(ValueError, match=r"prepare: the trainer goes on with its AdamW, in whose place"):
        lr_scheduler.LambdaLR(old, lambda step: 1.0)


@pytest.mark.parametrize("differ", [False, True])
def test_rates_of_groups_that_count_no_more_are_pointed_out(caplog, differ):
    accelerator = Accelerator()
    model, optimizer, _ = made(accelerator)
    if differ:
        optimizer.optimizer.param_groups[0]["lr"] = 0.1
    dmuon.prepare(accelerator, model, optimizer, **LRS)
    assert ("groups with rates of their own, which count no more" in caplog.text) == differ


class Wrapper(torch.optim.Optimizer):
    """Takes its groups from an optimizer inside, as schedule-free ones do."""

    def __init__(self, optimizer: Any) -> None:
        self._inside = optimizer
        self.state = optimizer.state

    @property
    def param_groups(self) -> Any:
        return self._inside.param_groups

    def step(self, closure: Any = None) -> Any:
        return self._inside.step(closure)


class Final(torch.optim.SGD):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError


@pytest.mark.parametrize("kind", ["no rate", "wrapper", "final"])
def test_any_optimizer_is_replaced(kind):
    accelerator = Accelerator()
    model, optimizer, _ = made(accelerator)
    inside = torch.optim.AdamW(model.parameters()) if kind != "final" else Final(model.parameters())
    if kind == "no rate":
        inside.param_groups[0]["lr"] = None
    optimizer.optimizer = old = Wrapper(inside) if kind == "wrapper" else inside
    if kind == "wrapper":
        lr_scheduler.LambdaLR(old, lambda step: 1.0)  # which stores a `step` of its own in it
    _, replaced, _ = dmuon.prepare(accelerator, model, optimizer, **LRS)
    assert isinstance(replaced.optimizer, dmuon.Muon)
    for use in (lambda: lr_scheduler.LambdaLR(old, lambda step: 1.0), old.step):
        with pytest.raises((ValueError, AttributeError)):
            use()
