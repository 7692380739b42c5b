"""Steps, saves and loads that an interrupt has ended: nothing is lost, or the next step says so."""

from __future__ import annotations

import copy
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from checkpoints import unlike
from dmuon._running.adamw import InnerAdamW
from interrupts import interrupt
from models import batch, loss_of, make_gpt
from scenario import Session, check, language_loss
from training import AHEAD

import dmuon


def test_an_interrupt_of_a_save_leaves_the_state():
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    live, hits = opt.state, []
    for number in range(0, 800, 5):  # more places than there are
        hits.append(interrupt(opt.state_dict, number))
        assert opt.state is live
    assert 20 < sum(hits) < len(hits)


def test_an_interrupt_of_a_load_is_told_unless_the_state_is_whole():
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)

    def trained(step: int) -> dict[str, Any]:
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        return copy.deepcopy(opt.state_dict())

    saved = [trained(step) for step in range(2)]
    weights, torn, number = copy.deepcopy(model.state_dict()), 0, 0
    while True:
        model.load_state_dict(weights)
        opt.load_state_dict(saved[0])
        if not interrupt(partial(opt.load_state_dict, saved[1]), number):
            break
        is_whole = any(not unlike(opt.state_dict(), state) for state in saved)
        with suppress(ValueError) if is_whole else pytest.raises(ValueError, match="or a load of the optimizer was"):
            trained(2)
        opt.zero_grad()
        torn += not is_whole
        number += 5
    assert torn > 3


def torn(s: Session, on: tuple[int, ...]) -> None:
    """A step is interrupted between matrices and AdamW's parameters, on some ranks. A load makes it good."""
    s.start(make_gpt(depth=2))
    s.train(0)
    if not s.reference:
        kept = copy.deepcopy((s.model.state_dict(), s.opt.state_dict()))
        s.backward(language_loss(1, s.size))
        interrupt = patch.object(InnerAdamW, "step", side_effect=KeyboardInterrupt)
        with interrupt if s.rank in on else nullcontext(), suppress(KeyboardInterrupt):
            s.opt.step()
        for _ in range(2):
            s.opt.zero_grad()
            s.backward(language_loss(1, s.size))
            with pytest.raises(ValueError, match="the last step has failed or was interrupted"):
                s.opt.step()
        s.opt.load_state_dict(kept[1])
        s.opt.zero_grad()
        s.backward(language_loss(1, s.size))
        with pytest.raises(ValueError, match="load_state_dict of the model and of the optimizer"):
            s.opt.step()
        s.opt.zero_grad()
        s.model.load_state_dict({"head.weight": kept[0]["head.weight"]}, strict=False)
        s.backward(language_loss(1, s.size))
        with pytest.raises(ValueError, match="load_state_dict of the model and of the optimizer"):
            s.opt.step()
        s.opt.zero_grad()
        s.model.load_state_dict(kept[0])
    s.train(2)


@pytest.mark.parametrize("on", [(1,), (0, 1, 2, 3)])
def test_a_step_that_was_interrupted_is_not_gone_on_with(ranks, on):
    check(ranks, torn, schedule=AHEAD, on=on)


def test_a_load_of_all_that_trains_makes_a_torn_step_good():
    """A parameter with several names may be loaded by any of them."""
    model = make_gpt(depth=1)
    model.alias = model.norm
    model.embedding.requires_grad_(False)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    loss_of(model, batch(0)).backward()
    with patch.object(InnerAdamW, "step", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        opt.step()
    opt.zero_grad()
    wrong = {
        name: value for name, value in model.state_dict().items() if "embedding" not in name and "alias" not in name
    }
    opt.load_state_dict(opt.state_dict())
    with suppress(RuntimeError, ValueError):
        model.load_state_dict({**wrong, "head.weight": torch.zeros(1)}, strict=False)
    around = nn.Sequential(model)
    around.load_state_dict({f"0.{name}": value for name, value in wrong.items() if "up" not in name}, strict=False)
    loss_of(model, batch(0)).backward()
    with pytest.raises(ValueError, match="load_state_dict of the model and of the optimizer"):
        opt.step()
    opt.zero_grad()
    with suppress(KeyError), dmuon.full_params(model, writeback=True):
        model.load_state_dict(wrong, strict=False)
        raise KeyError
    loss_of(model, batch(0)).backward()
    with pytest.raises(ValueError, match="load_state_dict of the model and of the optimizer"):
        opt.step()
    opt.zero_grad()
    model.load_state_dict(wrong, strict=False)
    loss_of(model, batch(0)).backward()
    opt.step()
