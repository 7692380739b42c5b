"""FSDP2's own flags that postpone the reduction of its gradients: exact if they end in time, else refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch.nn as nn
from models import batch, loss_of, make_gpt
from refusals import REFUSED, Refusals, expect_refusal, with_gradients
from scenario import Session, check, language_loss
from training import AHEAD, KEPT, NO_COPY, ON_DEMAND

import dmuon

refused = Refusals()


def set_flag(module: nn.Module, flag: str, on: bool, recurse: bool = True) -> None:
    getattr(module, f"set_{flag}")(on, **({} if flag == "is_last_backward" else {"recurse": recurse}))


def postponed(s: Session, flag: str, where: str, held: bool) -> None:
    """Micro-steps of which the last alone reduces; before them one is thrown away."""
    s.start(make_gpt(depth=2))
    for step in range(3):
        for micro in range(4):
            last = micro == 3
            if not s.reference:
                set_flag(s.model.get_submodule(where), flag, last, recurse=not where)
            with dmuon.no_sync(s.model) if held and not last and not s.reference else nullcontext():
                s.backward(language_loss(10 * step + micro, s.size), scale=0.3)
            if micro == 0:
                s.opt.zero_grad()
        s.clip(0.3)
        s.step()


@pytest.mark.parametrize(
    ("mesh", "flag", "where", "held", "schedule"),
    [
        ((2, 2), "requires_gradient_sync", "", False, AHEAD),
        ((4,), "requires_gradient_sync", "blocks.1", False, KEPT),
        ((2, 2), "requires_gradient_sync", "", True, NO_COPY),
        ((2, 2), "requires_all_reduce", "", False, ON_DEMAND),
        ((4, 1), "requires_all_reduce", "blocks.0", False, AHEAD),
        ((2, 2), "is_last_backward", "", False, KEPT),
    ],
)
def test_flags_that_are_on_in_the_last_micro_step_change_no_weight(ranks, mesh, flag, where, held, schedule):
    *notes, reference = check(ranks, postponed, mesh, schedule=schedule, flag=flag, where=where, held=held)
    for norms in notes:
        assert norms == pytest.approx(reference, rel=1e-4)


WORDS = ("clip or step: FSDP2 has not reduced the gradients of", "(False)", "Expected: True")


@refused(*WORDS, "'(root)'", flag="requires_gradient_sync")
@refused(*WORDS, "'(root)'", flag="requires_all_reduce")
@refused(*WORDS, "'(root)'", flag="is_last_backward")
@refused(*WORDS, "'blocks.1'", flag="requires_gradient_sync", where="blocks.1", clips=True)
@refused(*WORDS, "'blocks.1'", flag="requires_all_reduce", where="blocks.1", clips=True)
def left_off(mesh: Any, flag: str, where: str = "", clips: bool = False) -> None:
    """Set back after the backward, which is too late."""
    model, opt = with_gradients(mesh)
    opt.zero_grad()
    set_flag(model.get_submodule(where), flag, False, recurse=not where)
    loss_of(model, batch(1)).backward()
    set_flag(model, flag, True)
    with pytest.raises(ValueError, match="FSDP2 has not reduced"):
        opt.step()
    if clips:  # the first refusal is not forgotten
        dmuon.clip_grad_norm_(model, 1.0)
    opt.step()


@pytest.mark.parametrize(REFUSED, refused)
def test_flags_that_are_off_in_the_last_backward_are_refused(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
