"""A gradient that was set to zero is a gradient: weights decay, and momenta go on, as on one process."""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Skips, make_gpt, square_loss
from refusals import REFUSED, Refusals, expect_refusal, rank_of, with_gradients
from scenario import Session, check, language_loss
from training import AHEAD, FAR_AHEAD, KEPT, KEPT_NO_COPY, NO_COPY, ON_DEMAND

import dmuon

refused = Refusals()


def set_to_zero(s: Session, how: str) -> None:
    """Of all parameters that have a gradient."""
    gradients = [p.grad for p in s.model.parameters() if p.grad is not None]
    if how == "optimizer":
        s.opt.zero_grad(set_to_none=False)
    elif how == "model":
        s.model.zero_grad(set_to_none=False)
    elif how == "zero_":
        for gradient in gradients:
            gradient.zero_()
    else:
        torch._foreach_zero_(gradients)


def unused_block(s: Session, how: str, fsdp: bool) -> None:
    """A block is unused in odd steps, another always; in step 3 nothing is used, and in step 5 gradients are none."""
    torch.manual_seed(0)
    s.start(Skips(), units=(lambda model: []) if fsdp else None)
    for step in range(6):
        skipped = (2, 1) if step % 2 else (2,)
        if step != 3:
            s.backward(square_loss(step, dict.fromkeys(range(s.size), skipped)))
        if step != 1:
            s.clip(0.1)
        s.opt.step()
        set_to_zero(s, how) if step != 4 else s.opt.zero_grad()


@pytest.mark.parametrize(
    ("mesh", "how", "fsdp", "schedule"),
    [
        ((2, 2), "optimizer", True, AHEAD),
        ((2, 2), "model", False, NO_COPY),
        ((4,), "zero_", True, KEPT),
        ((4, 1), "_foreach_zero_", True, FAR_AHEAD),
        ((3,), "optimizer", False, ON_DEMAND),
    ],
)
def test_gradients_that_were_set_to_zero_decay_weights_and_go_on_along_momenta(ranks, mesh, how, fsdp, schedule):
    *notes, reference = check(ranks, unused_block, mesh, schedule=schedule, how=how, fsdp=fsdp)
    for norms in notes:
        assert norms == pytest.approx(reference, rel=1e-4, abs=1e-9)
    assert reference[2] == 0


def between_micro_steps(s: Session, held: bool, fsdp: bool, goes_on: bool) -> None:
    """Gradients that are not finite are set to zero between micro-steps, or before a step without another backward."""
    s.start(make_gpt(depth=2), **({} if fsdp else {"units": None}))
    s.train(0)
    for step in (1, 3):
        with dmuon.no_sync(s.model) if held and not s.reference else nullcontext():
            s.backward(language_loss(step, s.size), scale=math.nan)
        s.opt.zero_grad(set_to_none=False)
        if goes_on:
            s.backward(language_loss(step + 1, s.size))
        s.opt.step()
    if not s.reference:
        s.notes.append(s.opt.skipped_steps)


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize(
    ("mesh", "held", "fsdp", "schedule"),
    [
        ((2, 2), True, True, AHEAD),
        ((4, 1), True, False, NO_COPY),
        ((2, 2), False, True, KEPT_NO_COPY),
        ((4,), True, True, ON_DEMAND),
    ],
)
def test_a_zero_replaces_what_micro_steps_have_summed(ranks, mesh, held, fsdp, goes_on, schedule):
    *notes, _ = check(ranks, between_micro_steps, mesh, schedule=schedule, held=held, fsdp=fsdp, goes_on=goes_on)
    assert notes == [[0]] * len(notes)


def one_of_all(s: Session) -> None:
    """One gradient is set to zero, by a rank twice, others are not; a block is frozen, and evaluations come between."""
    s.start(make_gpt(depth=2))
    for step in range(4):
        s.backward(language_loss(step, s.size))
        for _ in range(2 if s.rank == 1 else 1):
            s.model.blocks[0].qkv.weight.grad.zero_()
        with torch.no_grad():
            language_loss(step, s.size)(s.model, s.rank or 0)
        s.opt.step()
        s.opt.zero_grad(set_to_none=False)
        s.model.blocks[1].requires_grad_(step != 1)


def test_a_single_gradient_is_set_to_zero(ranks):
    check(ranks, one_of_all, schedule=AHEAD)


class _Boom(Exception):
    pass


def after_a_backward_that_raised(s: Session) -> None:
    s.start(make_gpt(depth=3), units=None)
    for step in range(3):
        if not s.reference:

            def explode(gradient: torch.Tensor) -> None:
                raise _Boom

            def plant(module: nn.Module, args: Any, output: torch.Tensor) -> None:
                output.register_hook(explode)

            handle = s.model.blocks[1].up.register_forward_hook(plant)  # after a gradient of the same unit
            with suppress(_Boom):
                s.backward(language_loss(99, s.size))
            handle.remove()
        s.opt.zero_grad(set_to_none=False)
        s.backward(language_loss(step, s.size))
        s.opt.step()


@pytest.mark.parametrize("schedule", [AHEAD, NO_COPY])
def test_what_a_backward_that_raised_still_owes_is_set_to_zero_too(ranks, schedule):
    check(ranks, after_a_backward_that_raised, schedule=schedule)


def changed_by_one_rank_and_cleared(s: Session) -> None:
    """What a rank alone does with gradients does not count once they are cleared."""
    s.start(make_gpt(depth=2))
    s.train(0)
    s.backward(language_loss(1, s.size))
    if s.rank == 1 and not s.reference:
        s.model.blocks[0].up.weight.grad.zero_()
        s.model.blocks[1].up.weight.grad.mul_(2)
    s.opt.zero_grad()
    s.train(2)


def test_what_a_rank_has_changed_alone_may_be_cleared(ranks):
    check(ranks, changed_by_one_rank_and_cleared, schedule=AHEAD)


@refused("ranks differ", "the gradient of 'blocks.0.up.weight' set to zero", "nothing")
def set_to_zero_on_one_rank(mesh: Any) -> None:
    model, opt = with_gradients(mesh)
    if rank_of(mesh) == 1:
        model.blocks[0].up.weight.grad.zero_()
    opt.step()


@pytest.mark.parametrize(REFUSED, refused)
def test_ranks_that_set_other_gradients_to_zero_are_refused(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
