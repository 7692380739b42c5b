"""dmuon.offload and dmuon.load: memory leaves the device, values come back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import batch, loss_of, make_gpt
from pool import TEST_DEVICE
from refusals import REFUSED, Refusals, expect_refusal, ready
from scenario import Session, check, language_loss
from training import AHEAD, KEPT, NO_COPY, REPLICATED, place_of

import dmuon

refused = Refusals()


def moved(s: Session) -> None:
    """Between steps, between a backward and its step, and twice in a row."""
    s.start(make_gpt(depth=3))
    for step in range(3):
        away(s)
        s.backward(language_loss(step, s.size), 0.5)
        away(s)
        s.backward(language_loss(10 + step, s.size), 0.5)
        away(s)
        s.clip(0.3)
        away(s)
        s.step()
        away(s)
        away(s)


def away(s: Session) -> None:
    if s.reference:
        return
    s.opt._runtime.meet("a test")  # frees what travels
    kept = s.opt._runtime.engine.statistics()["current_bytes"]
    states = (s.opt.state[placeholder] for placeholder in s.opt._runtime.placeholders)
    held = [tensor for state in states for tensor in state.values() if type(tensor) is torch.Tensor]
    dmuon.offload(s.model)
    for tensor in held:
        with pytest.raises(RuntimeError, match=r"dmuon\.offload: .* Expected: dmuon\.load\(model\) first"):
            tensor.norm()
    planned = s.opt.plan.native.memory[s.rank]
    left = s.opt._runtime.engine.statistics()["current_bytes"]
    if not s.schedule.get("replicated"):
        assert kept - left == planned.state + planned.node_copy
    elif TEST_DEVICE != "cpu":  # CPUs keep freed weights' blocks for the next buffers
        assert left == 0
    dmuon.load(s.model)
    assert s.opt._runtime.engine.statistics()["current_bytes"] == left + planned.state + planned.node_copy


@pytest.mark.parametrize(
    ("mesh", "schedule"), [((2, 2), AHEAD), ((2, 2), KEPT), ((4, 1), NO_COPY), ((1,), AHEAD), ((2, 2), REPLICATED)]
)
def test_training_goes_on_as_if_nothing_had_moved(ranks, mesh, schedule):
    check(ranks, moved, mesh, schedule=schedule)


USES: dict[str, Callable[[Any, Any], object]] = {
    "a forward": lambda model, opt: model(batch(0)),
    "step()": lambda model, opt: opt.step(),
    "clip_grad_norm_": lambda model, opt: dmuon.clip_grad_norm_(model, 1.0),
    "state_dict()": lambda model, opt: model.state_dict(),
    "opt.state_dict()": lambda model, opt: opt.state_dict(),
    "load_state_dict()": lambda model, opt: model.load_state_dict({}),
    "full_params": lambda model, opt: dmuon.full_params(model).__enter__(),
    "offload()": lambda model, opt: dmuon.offload(model),
    "verify()": lambda model, opt: dmuon.verify(model, opt),
    "zero_grad": lambda model, opt: opt.zero_grad(set_to_none=False),
    "a gradient": lambda model, opt: model.blocks[0].up.weight.grad.mul_(0.5),
}


@refused("dmuon.offload: a forward after it", "dmuon.load(model) first", use="a forward")
@refused("dmuon.offload: step() after it", "dmuon.load(model) first", use="step()")
@refused("dmuon.offload: clip_grad_norm_ after it", "dmuon.load(model) first", use="clip_grad_norm_")
@refused("dmuon.offload: state_dict() after it", "dmuon.load(model) first", use="state_dict()")
@refused("dmuon.offload: opt.state_dict() after it", "dmuon.load(model) first", use="opt.state_dict()")
@refused("dmuon.offload: load_state_dict() after it", "dmuon.load(model) first", use="load_state_dict()")
@refused("dmuon.offload: full_params after it", "dmuon.load(model) first", use="full_params")
@refused("dmuon.offload: verify() after it", "dmuon.load(model) first", use="verify()")
@refused("dmuon.offload: offload() after it", "dmuon.load(model) first", use="offload()")
def used(mesh: Any, use: str) -> None:
    model, opt = ready(mesh)
    loss_of(model, batch(0)).backward()
    dmuon.offload(model)
    try:
        USES[use](model, opt)
    finally:
        dmuon.load(model)
        opt.step()


class NoMemory(Exception):
    pass


def fails(mesh: Any, call: str, error: type[BaseException]) -> None:
    """One rank has no memory, or is interrupted, once. Nothing has changed then, and the same call works."""
    ends = []
    for fails in (False, True):
        s = Session(mesh, AHEAD)
        model = s.start(make_gpt(depth=2))
        s.train(0)
        loss_of(model, batch(1)).backward()
        if call == "load":
            dmuon.offload(model)
        if fails:
            runtime = s.opt._runtime
            runtime.engine = Failing(runtime.engine, raises=place_of(mesh)[0] == 1, error=error)
            with pytest.raises((ValueError, KeyboardInterrupt), match=r"NoMemory|KeyboardInterrupt|^$"):
                getattr(dmuon, call)(model)
            if call == "load":
                with pytest.raises(ValueError, match=r"dmuon\.load\(model\) first"):
                    s.opt.step()
            runtime.engine = runtime.engine.engine
        if call == "load" or not fails:
            getattr(dmuon, call)(model)
        if call == "offload" and not fails:
            dmuon.load(model)
        s.step()
        s.train(2)
        ends.append(s.weights())
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


class Failing:
    """An engine whose moves fail on a rank."""

    def __init__(self, engine: Any, raises: bool, error: type[BaseException]) -> None:
        self.engine, self.raises, self.error = engine, raises, error

    def __getattr__(self, name: str) -> Any:
        if name in ("move_out", "move_back") and self.raises:
            return self.fail
        return getattr(self.engine, name)

    def fail(self) -> None:
        if self.raises:
            self.raises = False
            if self.error is KeyboardInterrupt:
                self.engine.move_out()  # it comes behind this call
            raise self.error


@pytest.mark.parametrize(("call", "error"), [("offload", NoMemory), ("load", NoMemory), ("offload", KeyboardInterrupt)])
def test_a_rank_without_memory_or_with_an_interrupt_changes_nothing(ranks, call, error):
    ranks.run(fails, (2, 2), call=call, error=error)


def averages(mesh: Any) -> None:
    """An average that goes while all is out; then a backward and reads are refused, and training goes on."""
    model, opt = ready(mesh)
    ema = dmuon.Ema(model)
    loss = loss_of(model, batch(0))
    dmuon.offload(model)
    del ema
    gc.collect()
    with pytest.raises(ValueError, match=r"a backward after it. Expected: dmuon\.load\(model\) first"):
        loss.backward()
    dmuon.load(model)
    opt.zero_grad()
    loss_of(model, batch(0)).backward()
    opt.step()


def test_what_is_out_cannot_be_used_and_may_go(ranks):
    ranks.run(averages, (2, 2))


@refused("offload()", "full_params")
def inside_full_params(mesh: Any) -> None:
    model, opt = ready(mesh)
    with dmuon.full_params(model, writeback=True), pytest.raises(ValueError, match="full_params") as caught:
        dmuon.offload(model)
    loss_of(model, batch(0)).backward()
    opt.step()
    raise caught.value


@refused("load: model: expected one after dmuon.offload")
def loaded_too_early(mesh: Any) -> None:
    model, _ = ready(mesh)
    dmuon.load(model)


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
