"""Forwards and backwards beside those that train leave no trace: the weights are one process's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import batch, loss_of, make_gpt
from scenario import Session, blocks_of, check, language_loss
from training import AHEAD, FAR_AHEAD, KEPT, KEPT_NO_COPY, NO_COPY, ON_DEMAND


def evaluation(s: Session) -> None:
    model = s.start(make_gpt(depth=2))
    tokens = batch(77)

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            loss = float(loss_of(model, tokens))
        model.train()
        return loss

    s.notes.append(evaluate())  # before the first step
    for step in range(3):
        s.train(step)
        s.notes.append(evaluate())
        with torch.inference_mode():
            s.notes.append(float(loss_of(model, tokens)))
        s.notes.append(evaluate())


@pytest.mark.parametrize("schedule", [AHEAD, KEPT], ids=["ahead", "kept"])
def test_evaluation_before_and_between_steps(ranks, schedule):
    *notes, reference = check(ranks, evaluation, schedule=schedule)
    for note in notes:
        assert note == pytest.approx(reference, rel=1e-4)


def dropped_graph(s: Session) -> None:
    model = s.start(make_gpt(depth=2))
    loss_of(model, batch(50))
    s.train(0)
    for step in (1, 2):
        loss_of(model, batch(50 + step))
        kept = loss_of(model, batch(60 + step))
        s.train(step)
        del kept


@pytest.mark.parametrize("schedule", [FAR_AHEAD, KEPT_NO_COPY], ids=["far ahead", "kept, no copy"])
def test_forwards_without_backward(ranks, schedule):
    check(ranks, dropped_graph, schedule=schedule)


def cleared_gradients(s: Session, by: str) -> None:
    """A backward whose gradients are thrown away, in the first step and in the second."""
    s.start(make_gpt(depth=2))
    for step in (0, 1, 2):
        s.backward(language_loss(90 + step, s.size))
        if s.reference or by == "opt":
            s.opt.zero_grad()
        else:
            s.model.zero_grad(set_to_none=by == "model")
        s.train(step)


@pytest.mark.parametrize(("by", "schedule"), [("opt", ON_DEMAND), ("model", NO_COPY), ("zeros", KEPT)])
def test_gradients_that_are_cleared_leave_no_trace(ranks, by, schedule):
    check(ranks, cleared_gradients, schedule=schedule, by=by)


class _Boom(Exception):
    pass


def _explode(gradient: torch.Tensor) -> None:
    raise _Boom


def _plant(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(_explode)


def raised_backward(s: Session, first: bool, clear: bool) -> None:
    """Plain replicas: a backward that raises half-way on every rank, then good steps."""
    s.start(make_gpt(depth=3), units=None)
    if not first:
        s.train(0)
    if not s.reference:
        handle = s.model.blocks[1].register_forward_hook(_plant)
        try:
            s.backward(language_loss(99, s.size))
            raise AssertionError("the backward did not raise")
        except _Boom:
            pass
        handle.remove()
        s.opt.zero_grad() if clear else s.model.zero_grad()
    s.train(1, 2)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("clear", "schedule"), [(True, AHEAD), (False, NO_COPY)])
def test_a_backward_that_raised_leaves_no_trace(ranks, first, clear, schedule):
    check(ranks, raised_backward, schedule=schedule, first=first, clear=clear)


def raises(model: nn.Module) -> None:
    model.blocks[1].register_forward_hook(lambda module, args, output: _explode(output))
    with pytest.raises(_Boom):
        loss_of(model, batch(99))


def returns_early(model: nn.Module) -> None:
    model.blocks = model.blocks[:1]
    loss_of(model, batch(99))


def uses_a_part(model: nn.Module) -> None:
    model.blocks[0](torch.randn(2, 3, 24))


def unfinished_forward(s: Session, fsdp: bool, trained: int, how: Callable[[nn.Module], None]) -> None:
    """A forward that uses not all of a model, with garbage collected on some ranks, then another model."""
    units = blocks_of if fsdp else None
    first = s.another()
    kept = [first.start(make_gpt(depth=3), units=units)]
    model = weakref.ref(first.model)
    first.train(*range(trained))
    if not s.reference:
        gc.disable()
        how(first.model)
        del first
        if s.rank % 2:
            kept.clear()
            gc.collect()
    s.start(make_gpt(seed=1, depth=2), units=units)
    gc.enable()
    s.train(0, 1)
    s.notes.append(model() is not None)


@pytest.mark.parametrize(
    ("how", "trained", "schedule", "fsdp"),
    [
        (raises, 0, AHEAD, True),
        (raises, 2, AHEAD, False),
        (returns_early, 2, AHEAD, True),
        (returns_early, 2, KEPT, True),
        (returns_early, 2, KEPT, False),
        (uses_a_part, 2, AHEAD, True),
    ],
)
def test_an_unfinished_forward_does_not_disturb_another_model(ranks, fsdp, how, trained, schedule):
    *alive, _ = check(ranks, unfinished_forward, schedule=schedule, fsdp=fsdp, trained=trained, how=how)
    assert alive == [[True], [False]] * 2


def two_backwards(s: Session) -> None:
    s.start(make_gpt(depth=2))
    for step in range(3):
        for rank in s.each_rank():
            loss = language_loss(step, s.size)(s.model, rank) / (s.size if s.reference else 1)
            loss.backward(retain_graph=True)
            (3 * loss).backward()
        s.step()


def test_two_backwards_through_one_graph_add(ranks):
    check(ranks, two_backwards, schedule=FAR_AHEAD)
