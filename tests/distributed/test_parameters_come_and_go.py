"""Parameters of AdamW that come into a model between steps, and that leave it again."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn as nn
from models import make_gpt
from scenario import Session, check, language_loss
from training import AHEAD, NO_COPY, REPLICATED

MESHES = [((2, 2), REPLICATED), ((1, 4), AHEAD), ((3,), NO_COPY)]


class Adapted(nn.Module):
    """Parameters that a loss reads beside a model."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.added = nn.ParameterDict({"first": nn.Parameter(torch.ones(size)), "second": nn.Parameter(torch.ones(3))})

    def forward(self) -> torch.Tensor:
        first, second = self.added["first"], self.added["second"]
        return (first * torch.arange(len(first))).sum() + second.square().sum()


def added(s: Session, size: int) -> None:
    """A model gets parameters between steps; the ranks' gradients of them differ."""
    s.start(make_gpt(depth=2), units=None)
    s.train(0)
    s.model.adapter = Adapted(size)
    optimizer = s.opt.adamw if s.reference else s.opt
    optimizer.add_param_group({"params": list(s.model.adapter.parameters()), "lr": 1e-2, "weight_decay": 0.0})
    s.initial |= {name: p.detach().clone() for name, p in s.model.named_parameters() if "adapter" in name}
    for step in range(1, 4):
        value = language_loss(step, s.size)
        s.backward(lambda model, rank, value=value: value(model, rank) + (1 + rank) * model.adapter())
        s.notes.append(float(nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)))
        s.step()


@pytest.mark.parametrize("size", [12, 600])
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_added_parameters_train_from_the_next_backward_on(ranks, mesh, schedule, size):
    *notes, expected = check(ranks, added, mesh, schedule=schedule, size=size)
    for norms in notes:
        assert norms == pytest.approx(expected, rel=1e-4)


def came_and_went(s: Session, size: int, stays: bool, freezes: bool, cleared: bool = True) -> None:
    """Parameters leave their group and, unless they stay, the model: other optimizers may train what stays.

    Their gradients may not be cleared before.
    """
    s.start(make_gpt(depth=2), units=None)
    optimizer = s.opt.adamw if s.reference else s.opt
    for step in range(0, 4, 2):
        s.model.adapter = Adapted(size)
        parameters = list(s.model.adapter.parameters())
        optimizer.add_param_group({"params": parameters})

        def loss(model: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            own = (1 + rank) * model.adapter()  # first, so that its gradients come inside of the backward's pass
            return own + language_loss(step, s.size)(model, rank)

        s.backward(loss)
        gradients = [p.grad for p in parameters]
        s.step()
        if not cleared:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        gradients = []
        optimizer.param_groups.pop()
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
        if stays:
            s.backward(loss)
            s.step()
            s.notes.append([p.grad.clone() for p in parameters])
            s.model.adapter.zero_grad()
        if freezes:
            for parameter in parameters:
                parameter.requires_grad_(False)
        refs = [weakref.ref(parameter) for parameter in parameters]
        parameter, parameters, s.model.adapter = None, [], None
        s.train(step + 1, step + 2)
        gc.collect()
        assert s.reference or not any(ref() is not None for ref in refs)


@pytest.mark.parametrize(
    ("stays", "freezes", "cleared"),
    [(False, False, True), (True, False, True), (False, True, True), (False, False, False)],
)
@pytest.mark.parametrize("size", [12, 600])
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_parameters_that_have_left_are_freed(ranks, mesh, schedule, size, stays, freezes, cleared):
    which = {"stays": stays, "freezes": freezes, "cleared": cleared}
    *notes, expected = check(ranks, came_and_went, mesh, schedule=schedule, size=size, **which)
    for gradients in notes:
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


def replaced_head(s: Session) -> None:
    """The model's head of the start makes room for another."""
    s.start(make_gpt(depth=2), units=None)
    s.train(0)
    optimizer = s.opt.adamw if s.reference else s.opt
    old = weakref.ref(s.model.head.weight)
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not old()]
    optimizer.state.pop(old(), None)
    values = old().detach().flip(0)
    s.model.head = nn.Linear(s.model.head.in_features, s.model.head.out_features, bias=False)
    s.model.head.weight.data.copy_(values)
    s.initial["head.weight"] = s.model.head.weight.detach().clone()
    optimizer.add_param_group({"params": [s.model.head.weight]})
    s.train(1, 2)
    gc.collect()
    assert s.reference or old() is None


@pytest.mark.parametrize(("mesh", "schedule"), [*MESHES, ((1,), AHEAD)])
def test_a_replaced_head_is_freed(ranks, mesh, schedule):
    check(ranks, replaced_head, mesh, schedule=schedule)


def taking_turns(s: Session, of_model: bool, another: bool) -> None:
    """Parameters are away for two steps, from their group and maybe the model. Maybe another optimizer trains them."""
    s.start(make_gpt(depth=2), units=None)
    adapter = Adapted(12)
    optimizer = s.opt.adamw if s.reference else s.opt
    optimizer.add_param_group({"params": list(adapter.parameters())})
    others = torch.optim.SGD(adapter.parameters(), lr=1e-2)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return language_loss(step, s.size)(model, rank) + (1 + rank) * adapter()

    for step in range(0, 6, 3):
        s.model.adapter = adapter if of_model else None
        s.backward(partial(loss, step=step))
        if another and step > 0:
            others.step()
        s.step()
        s.model.adapter = None
        if step == 0 or not another:
            group = optimizer.param_groups.pop()
        adapter.zero_grad()
        s.train(step + 1, step + 2)
        if not another:
            optimizer.param_groups.append(group)
    s.notes.append([parameter.detach().clone() for parameter in adapter.parameters()])


@pytest.mark.parametrize("another", [False, True])
@pytest.mark.parametrize("of_model", [False, True])
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_parameters_that_come_back_are_averaged_again(ranks, mesh, schedule, of_model, another):
    *notes, expected = check(ranks, taking_turns, mesh, schedule=schedule, of_model=of_model, another=another)
    for values in notes:
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)


def away_apart(s: Session) -> None:
    """Rank 1 takes parameters away, the others freeze them. Then all have them again."""
    s.start(make_gpt(depth=2), units=None)
    optimizer = s.opt.adamw if s.reference else s.opt
    s.model.adapter = adapter = Adapted(12)
    optimizer.add_param_group({"params": list(adapter.parameters())})

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        return language_loss(0, s.size)(model, rank) + (1 + rank) * adapter()

    s.backward(loss)
    s.step()
    adapter.zero_grad()
    group = optimizer.param_groups.pop()
    if not s.reference and s.rank == 1:
        s.model.adapter = None
    else:
        adapter.requires_grad_(False)
    s.train(1)
    s.model.adapter = adapter.requires_grad_(True)
    optimizer.param_groups.append(group)
    s.backward(loss)
    s.step()
    s.model.adapter = None
    s.notes.append([parameter.detach().clone() for parameter in adapter.parameters()])


@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_parameters_that_left_in_different_ways_come_back(ranks, mesh, schedule):
    *notes, expected = check(ranks, away_apart, mesh, schedule=schedule)
    for values in notes:
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)
