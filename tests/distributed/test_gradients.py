"""Gradients that add, are missing, are no numbers, or are clipped: the weights are one process's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from dmuon._setup.placeholder import OwnedTensor
from logged import logged
from models import Matrices, batch, loss_of, make_gpt, square_loss
from scenario import Session, check, language_loss
from training import AHEAD, FAR_AHEAD, KEPT, KEPT_NO_COPY, NO_COPY, ON_DEMAND, dedicate

import dmuon


def micro_steps(s: Session) -> None:
    s.start(make_gpt(depth=2))
    for step in (0, 2, 4):
        for micro in (0, 1):
            s.backward(language_loss(step + micro, s.size), scale=0.5)
        s.step()


def test_gradients_of_micro_steps_add(ranks):
    check(ranks, micro_steps, schedule=KEPT)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10, bias=False)
        self.second = nn.Linear(10, 10, bias=False)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Branch() for _ in range(3))

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, skip and i == 1)
        return x


class _Branch(_Two):
    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return x + y if skip else x + self.second(y)


def _branch_loss(step: int, skip: tuple[int, ...]) -> Any:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        x = torch.randn(5, 10, generator=torch.Generator().manual_seed(100 * step + rank))
        return (model(x, rank in skip) - x.sin()).square().mean()

    return loss


def _momentum(s: Session, name: str) -> Any:
    if s.reference:
        return s.opt.buffers[name].clone()
    held = s.opt.state[dict(s.model.named_parameters())[name]]["momentum_buffer"]
    return None if isinstance(held, OwnedTensor) else held.clone()


def missing_gradients(s: Session, without: tuple[int, ...]) -> None:
    """The matrix blocks.1 has no gradient on some ranks; on all of them it is left alone."""
    torch.manual_seed(0)
    s.start(_Branches(), units=lambda m: [])
    for step in range(4):
        s.backward(_branch_loss(step, without if step in (1, 2) else ()))
        s.step()
        if step in (0, 2):
            s.notes.append(_momentum(s, "blocks.1.second.weight"))


@pytest.mark.parametrize(("without", "schedule"), [((1,), AHEAD), ((0, 2, 3), NO_COPY), ((0, 1, 2, 3), ON_DEMAND)])
def test_a_missing_gradient_is_zero_on_some_ranks_and_nothing_on_all(ranks, without, schedule):
    *notes, reference = check(ranks, missing_gradients, schedule=schedule, without=without)
    owners = [note for note in notes if note[0] is not None]
    assert len(owners) == 1
    for got, expected in zip(owners[0], reference, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-7)
    if len(without) == 4:
        # Three steps, of which the matrix took part in the first alone.
        assert torch.equal(owners[0][0], owners[0][1])


def toggled_requires_grad(s: Session) -> None:
    s.start(make_gpt(depth=2), units=None)
    for step in range(4):
        frozen = step in (1, 2)
        s.model.blocks[0].up.weight.requires_grad_(not frozen)
        s.model.blocks[1].requires_grad_(step != 2)
        s.train(step)


def test_requires_grad_may_change_between_steps(ranks):
    check(ranks, toggled_requires_grad, schedule=KEPT_NO_COPY)


def warnings_of_unfrozen(mesh: Any, add: bool) -> list[str]:
    """What dmuon logs in three steps when a layer that was frozen at set-up is unfrozen after the first."""
    model = make_gpt(depth=2)
    model.blocks[1].requires_grad_(False)
    dedicate(model, mesh, AHEAD)
    opt = dmuon.Muon(model)
    with logged() as messages:
        for step in range(3):
            if step == 1:
                model.blocks[1].requires_grad_(True)
                if add:
                    opt.add_param_group({"params": list(model.blocks[1].parameters())})
            loss_of(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()
    return [message for message in messages if "frozen" in message]


@pytest.mark.parametrize("add", [True, False])
def test_a_layer_that_is_unfrozen_after_set_up_is_not_left_out_in_silence(ranks, add):
    first, *others = ranks.run(warnings_of_unfrozen, (2,), add=add)
    names = {name for name, _ in make_gpt(depth=2).named_parameters() if name.startswith("blocks.1.")}
    assert [set(message.split("'")[1 : 2 * message.count("', '") + 3 : 2]) for message in first] == [names] * (not add)
    assert others == [[]]


def gradient_of_the_input(s: Session) -> None:
    """autograd.grad with respect to the input alone leaves the parameters' gradients as they are."""
    torch.manual_seed(0)
    s.start(Matrices([10, 8, 6, 2]), units=None)
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(5), requires_grad=True)
    for step in range(3):
        (gradient,) = torch.autograd.grad(s.model(x).sum(), x)
        s.notes.append(gradient.clone())
        s.backward(square_loss(step))
        (gradient,) = torch.autograd.grad(s.model(x).sum(), x)
        s.notes.append(gradient.clone())
        s.step()


def test_autograd_grad_of_the_input_alone(ranks):
    *notes, reference = check(ranks, gradient_of_the_input, schedule=FAR_AHEAD)
    for note in notes:
        for got, expected in zip(note, reference, strict=True):
            assert torch.allclose(got, expected, rtol=1e-3, atol=1e-5)


def non_finite(s: Session, value: float, where: str) -> None:
    """A bad gradient on one rank in the second step, which then never was; a bad one of the head is clipped first."""
    s.start(make_gpt(depth=2))
    s.train(0)
    if not s.reference:
        before = s.weights()
        bad = s.rank == 2

        def poison(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output * torch.tensor(value) if bad else output

        handle = s.model.get_submodule(where).register_forward_hook(poison)
        s.backward(language_loss(5, s.size))
        if where == "head":
            s.clip(1.0)
        s.step()
        handle.remove()
        after = s.weights()
        s.notes.append((s.opt.skipped_steps, all(torch.equal(before[n], after[n]) for n in before)))
    s.train(1, 2)
    if not s.reference:
        s.notes.append(s.opt.skipped_steps)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("where", "schedule"), [("blocks.1", AHEAD), ("head", KEPT)])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(ranks, value, where, schedule):
    *notes, _ = check(ranks, non_finite, schedule=schedule, value=value, where=where)
    for *norms, skipped_and_unchanged, skipped_at_end in notes:
        assert (skipped_and_unchanged, skipped_at_end) == ((1, True), 1)
        assert len(norms) == (where == "head")
        assert all(math.isnan(norm) for norm in norms)


def clipped(s: Session, max_norm: float, units: bool = True) -> None:
    s.start(make_gpt(depth=2), **({} if units else {"units": None}))
    for step in range(3):
        for micro in range(2):
            s.backward(language_loss(10 * step + micro, s.size), scale=10.0)
        s.clip(max_norm)
        s.clip(max_norm)  # again: the verdict is kept, and scaled
        s.step()


@pytest.mark.parametrize(("units", "schedule"), [(True, NO_COPY), (False, ON_DEMAND)])
@pytest.mark.parametrize("mesh", [(2, 2), (4,)])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_clipping_equals_torch_on_one_process(ranks, mesh, max_norm, units, schedule):
    *notes, reference = check(ranks, clipped, mesh, schedule=schedule, max_norm=max_norm, units=units)
    for note in notes:
        assert note == pytest.approx(reference, rel=1e-4)
