"""A backward under fully_shard that raises and is caught: FSDP2 goes on, or every rank learns what it has lost."""

from __future__ import annotations

import copy
import itertools
import re
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from models import batch, loss_of, make_gpt
from pool import RankFailed
from refusals import REFUSED, Refusals, expect_refusal, rank_of, ready
from scenario import Session, blocks_of, check, language_loss
from training import AHEAD, FAR_AHEAD, KEPT, NO_COPY, ON_DEMAND, REPLICATED

import dmuon

refused = Refusals()


class _Boom(Exception):
    pass


def fail(model: nn.Module, where: str, backward: Any) -> None:
    """Runs a backward that raises when the gradient of an output comes to it."""

    def explode(gradient: torch.Tensor) -> None:
        raise _Boom

    def plant(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(explode)

    handle = model.get_submodule(where).register_forward_hook(plant)
    with suppress(_Boom):
        backward()
        raise AssertionError("the backward did not raise")
    handle.remove()


def failed(s: Session, where: str, held: bool, clear: str) -> None:
    """A backward fails in each step but the last, and its gradients are cleared."""
    s.start(make_gpt(depth=3))
    for step in range(4):
        if not s.reference and step < 3:
            with dmuon.no_sync(s.model) if held else nullcontext():
                fail(s.model, where, lambda: s.backward(language_loss(99, s.size)))
        if step < 3:
            s.model.zero_grad() if clear == "model" else s.opt.zero_grad(set_to_none=clear == "optimizer")
        s.backward(language_loss(step, s.size))
        assert all(p.grad is not None for p in s.model.parameters())
        s.clip(0.3)
        s.opt.step()
        s.opt.zero_grad()


@pytest.mark.parametrize(
    ("mesh", "where", "held", "clear", "schedule"),
    [
        ((2, 2), "blocks.1", False, "optimizer", AHEAD),
        ((4,), "blocks.1.up", False, "optimizer", KEPT),
        ((2, 2), "blocks.0.norm", True, "optimizer", NO_COPY),
        ((4,), "head", False, "model", ON_DEMAND),
        ((2, 2), "blocks.2.out", False, "model", FAR_AHEAD),
        ((4, 1), "embedding", False, "optimizer", AHEAD),
        ((2, 2), "blocks.1.down", False, "zeros", KEPT),
    ],
)
def test_a_backward_that_raised_leaves_no_trace_in_fsdp2(ranks, mesh, where, held, clear, schedule):
    *notes, reference = check(ranks, failed, mesh, schedule=schedule, where=where, held=held, clear=clear)
    for norms in notes:
        assert norms == pytest.approx(reference, rel=1e-4)


@refused("a backward has raised, so gradients are lost", "optimizer.zero_grad() after it", again=True)
@refused("a backward has raised, so gradients are lost", "optimizer.zero_grad() after it", again=False)
def not_cleared(mesh: Any, again: bool) -> None:
    """Of the second micro-step, which is repeated or not."""
    model, opt = ready(mesh)
    loss_of(model, batch(1)).backward()
    fail(model, "blocks.0", lambda: loss_of(model, batch(2)).backward())
    if again:
        loss_of(model, batch(2)).backward()
    opt.step()


@refused("FSDP2 gives no gradients to the parameters of '(root)'", "a new process that loads a checkpoint")
def unknown_state(mesh: Any) -> None:
    """As with a PyTorch whose FSDP2 keeps its state elsewhere."""
    model, opt = ready(mesh)
    with patch("dmuon._running.step_agreement.end_backward_of_fsdp2", side_effect=AttributeError):
        fail(model, "blocks.0", lambda: loss_of(model, batch(2)).backward())
        opt.zero_grad()
        opt.step()


@pytest.mark.parametrize(REFUSED, refused)
def test_what_is_lost_is_refused(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


def after_a_change(s: Session, units: Any, change: str) -> None:
    """A backward of a forward that had other weights is refused, also if a mean has come and gone."""
    s.start(make_gpt(depth=2), units)
    s.train(0)
    of_earlier = None if s.reference else language_loss(1, s.size)(s.model, s.rank)
    if not s.reference and change == "end of a mean":
        with dmuon.Ema(s.model).applied():
            of_earlier = language_loss(1, s.size)(s.model, s.rank)
    elif change == "step":
        s.train(2)
    elif change == "write":
        with s.full():
            pass
    elif not s.reference and change == "load":
        s.model.load_state_dict(copy.deepcopy(s.model.state_dict()))
    elif not s.reference and change == "mean":
        with dmuon.Ema(s.model).applied(), torch.no_grad():
            s.model(batch(3))
    if of_earlier is not None:
        with pytest.raises(ValueError, match=r"a backward through '.*', whose weights have changed since the forward"):
            of_earlier.backward()
        s.opt.zero_grad()
    s.train(4)


@pytest.mark.parametrize(
    ("mesh", "schedule", "units", "change"),
    [
        ((2, 2), REPLICATED, None, "step"),  # torch itself refuses the others, for AdamW's parameters
        *itertools.product([(2, 2)], [AHEAD], [blocks_of], ["step", "write", "load", "mean", "end of a mean"]),
        *itertools.product([(4,)], [KEPT], [blocks_of], ["step", "mean", "end of a mean"]),
    ],
)
def test_weights_of_a_forward_are_those_of_its_backward(ranks, mesh, schedule, units, change):
    check(ranks, after_a_change, mesh, schedule=schedule, units=units, change=change)


def alone(mesh: Any) -> None:
    model, opt = ready(mesh)
    if rank_of(mesh) == 1:
        fail(model, "blocks.0", lambda: loss_of(model, batch(1)).backward())
        opt.zero_grad()
    for step in range(2):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()


def test_a_backward_that_raised_on_one_rank_ends_all_ranks(ranks):
    with pytest.raises(RankFailed) as raised:
        ranks.run(alone, (2, 2))
    assert len(re.findall(r"--- rank \d+ ---", str(raised.value))) == 4


def test_gradients_cleared_by_hand_end_a_failed_backward():
    """Without fully_shard and ranks; a step before that raises."""
    model = make_gpt(depth=2)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    loss_of(model, batch(0)).backward()
    fail(model, "blocks.1", lambda: loss_of(model, batch(1)).backward())
    with pytest.raises(ValueError, match="a backward has raised, so gradients are lost"):
        opt.step()
    for parameter in model.parameters():
        parameter.grad = None
    with pytest.raises(ValueError, match="a backward has raised, so gradients are lost"):
        opt.step()  # which no forward has come before
    loss_of(model, batch(1)).backward()
    opt.step()
