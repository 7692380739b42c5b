"""Gradients that no fully_shard manages are means after each backward, as under DistributedDataParallel."""

from __future__ import annotations

import gc
import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Skips, batch, loss_of, make_gpt, part, square_loss
from scenario import Session, assert_equal_to_reference, check, language_loss
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from training import AHEAD, NO_COPY, REPLICATED

import dmuon

# The embedding and the head are messages of their own, norms and biases are not: see pool.py.
MESHES = [((2, 2), REPLICATED), ((1, 4), AHEAD), ((3,), REPLICATED)]


def gradients_of(s: Session) -> dict[str, torch.Tensor]:
    """Of all parameters but the matrices of blocks."""
    named = s.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.ndim == 1 or "embedding" in name or "head" in name}


def accumulated(s: Session, micro_steps: int) -> None:
    s.start(make_gpt(depth=2), units=None)
    for step in range(2):
        for micro_step in range(micro_steps):
            s.backward(language_loss(10 * step + micro_step, s.size))
        s.notes.append(gradients_of(s))
        s.step()


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_gradients_are_means_after_a_backward(ranks, mesh, schedule, micro_steps):
    *notes, expected = check(ranks, accumulated, mesh, schedule=schedule, micro_steps=micro_steps)
    for steps in notes:
        for got, wanted in zip(steps, expected, strict=True):
            assert got.keys() == wanted.keys()
            for name, gradient in got.items():
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)
        assert all(torch.equal(steps[-1][name], notes[0][-1][name]) for name in steps[-1])


def held_back(s: Session, to_the_end: bool) -> None:
    """Gradients of no_sync are a rank's own until a backward outside, or the step, averages them."""
    s.start(make_gpt(depth=2), units=None)
    for step in range(2):
        if s.reference:
            s.backward(language_loss(10 * step, s.size))
        else:
            with dmuon.no_sync(s.model):
                s.backward(language_loss(10 * step, s.size))
            if step == 0:
                assert torch.equal(s.model.norm.weight.grad, first_gradient(s))
        if not to_the_end:
            s.backward(language_loss(10 * step + 1, s.size))
        s.clip(0.1)
        s.step()


def first_gradient(s: Session) -> torch.Tensor:
    """This rank's own of `norm.weight`, by the first weights."""
    model = make_gpt(depth=2)
    loss_of(model, part(batch(0), s.rank, s.size)).backward()
    return model.norm.weight.grad


@pytest.mark.parametrize("to_the_end", [False, True])
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_gradients_of_no_sync_are_averaged_before_they_are_used(ranks, mesh, schedule, to_the_end):
    *notes, expected = check(ranks, held_back, mesh, schedule=schedule, to_the_end=to_the_end)
    for norms in notes:
        assert norms == pytest.approx(expected, rel=1e-4)


def zeroed(s: Session) -> None:
    """Gradients of no_sync become zeros. torch's clipping needs their norm."""
    s.start(make_gpt(depth=2), units=None)
    s.train(0)
    s.model.norm.bias.requires_grad_(False)  # and has no gradient
    with nullcontext() if s.reference else dmuon.no_sync(s.model):
        s.backward(language_loss(1, s.size))
    s.opt.zero_grad(set_to_none=False)
    s.notes.append(float(nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)))
    s.train(2)


@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_zeros_are_averaged_already(ranks, mesh, schedule):
    *notes, expected = check(ranks, zeroed, mesh, schedule=schedule)
    assert notes == [expected] * len(notes) == [[0.0]] * len(notes)


def beside_the_model(s: Session, clips_before: bool) -> None:
    """Each rank adds the gradient of a loss that its own weights of AdamW have alone, outside of the model."""
    s.start(make_gpt(depth=2), units=None)

    def penalty(model: nn.Module, rank: int) -> torch.Tensor:
        return (1 + rank) * (model.head.weight.square().sum() + model.norm.weight.square().sum())

    for step in range(3):
        s.backward(language_loss(step, s.size))
        if clips_before:
            s.clip(1e9)
        s.backward(penalty)
        s.clip(0.1)
        s.step()


@pytest.mark.parametrize("clips_before", [False, True])
def test_gradients_of_a_loss_beside_the_model_are_averaged_too(ranks, clips_before):
    *notes, expected = check(ranks, beside_the_model, schedule=REPLICATED, clips_before=clips_before)
    for norms in notes:
        assert norms == pytest.approx(expected, rel=1e-4)


def clipped_by_torch(mesh: Any, looks: bool) -> None:
    """Torch would take the norm of each rank's own gradients."""
    s = Session(mesh, REPLICATED)
    s.start(make_gpt(depth=1), units=None)
    s.backward(language_loss(0, s.size))
    if looks:
        dmuon.grad_norms(s.model)
    s.model.norm.weight.square().sum().backward()
    with pytest.raises(ValueError, match=r"a norm of torch's after .* through parameters of AdamW alone"):
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)


@pytest.mark.parametrize("looks", [False, True])
def test_torch_s_clipping_refuses_gradients_of_a_loss_beside_the_model(ranks, looks):
    ranks.run(clipped_by_torch, (2, 2), looks=looks)


def refused_step(s: Session) -> None:
    """A message that finds cleared gradients, and raises."""
    s.backward(language_loss(9, s.size))
    s.opt.zero_grad()
    group = s.opt.param_groups[0]
    lr, group["lr"] = group["lr"], group["lr"] * (1 + s.rank)
    with pytest.raises(ValueError, match="ranks differ"):
        s.opt.step()
    group["lr"] = lr


def without_a_backward(s: Session) -> None:
    """In the second step rank 1 computes a loss and drops it, in the third one rank 0."""
    s.start(make_gpt(depth=2), units=None)
    for step in range(4):
        if step == 1 and not s.reference:
            refused_step(s)
        value = language_loss(step, s.size)
        dropped = {1: 1, 2: 0}.get(step)
        s.backward(lambda model, rank, value=value, dropped=dropped: (value(model, rank), None)[rank == dropped])
        s.notes.append({name: p.grad is None for name, p in s.model.named_parameters() if p.ndim == 1})
        s.step()


@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_a_rank_without_a_backward_counts_as_zeros(ranks, mesh, schedule):
    *notes, _ = check(ranks, without_a_backward, mesh, schedule=schedule)
    for rank, steps in enumerate(notes):
        missing = [set(step.values()) for step in steps]
        assert missing == [{(step, rank) in ((1, 1), (2, 0))} for step in range(4)]


UNUSED = ("few", "many", "nobodys few", "nobodys many")


def skipping(s: Session) -> None:
    """Rank 2 alone has a gradient of two parameters, nobody of two others."""
    torch.manual_seed(0)
    model = Skips()
    model.extra = nn.ParameterDict({name: nn.Parameter(torch.ones(600 if "many" in name else 6)) for name in UNUSED})
    s.start(model, units=None)

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        value = square_loss(0)(model, rank)
        return value + (model.extra["few"].sum() + model.extra["many"].square().sum() if rank == 2 else 0)

    for _ in range(2):
        s.backward(square_loss(1))
        s.backward(loss)
        s.notes.append([model.extra[name].grad is None for name in UNUSED])
        s.step()


@pytest.mark.parametrize("schedule", [NO_COPY, REPLICATED])
def test_missing_gradients_are_zeros_and_those_that_nobody_has_stay_away(ranks, schedule):
    notes = check(ranks, skipping, schedule=schedule)
    assert notes == [[[False, False, True, True]] * 2] * 5


class Sums(nn.Module):
    """Gradients of `first` and `second` are two views of one tensor."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(size))
        self.blocks = nn.ModuleList([nn.Linear(12, 12, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.first.unsqueeze(0) + self.second.unsqueeze(0)
        return self.blocks[0](x) + both[:, :12] * x.square()


def summed(s: Session, size: int) -> None:
    torch.manual_seed(0)
    s.start(Sums(size), units=None)
    for step in range(2):
        x = [torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in range(s.size)]
        # One backward: PyTorch itself would add each further one twice to the memory that they share.
        losses = torch.stack([s.model(x[rank]).square().mean() for rank in s.each_rank()])
        losses.mean().backward()
        s.notes.append([s.model.first.grad[:12].tolist(), s.model.second.grad[:12].tolist()])
        s.step()


@pytest.mark.parametrize("size", [12, 600])
def test_gradients_that_share_memory_are_means(ranks, size):
    *notes, expected = check(ranks, summed, schedule=REPLICATED, size=size)
    for gradients in notes:
        torch.testing.assert_close(torch.tensor(gradients), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def assigned(s: Session, looks: bool) -> None:
    """After a backward each rank replaces gradients of AdamW's by its own of another loss."""
    s.start(make_gpt(depth=1), units=None)
    for step in range(2):
        s.backward(language_loss(step, s.size))
        if looks and not s.reference:
            dmuon.grad_norms(s.model)
        for name in ("head.weight", "norm.weight"):
            parameter = s.model.get_parameter(name)
            own = [(1.0 + rank) * parameter.detach() for rank in s.each_rank()]
            parameter.grad = torch.stack(own).sum(0) / (s.size if s.reference else 1)
        s.clip(0.1)
        s.step()


@pytest.mark.parametrize("looks", [False, True])
def test_assigned_gradients_are_averaged(ranks, looks):
    *notes, expected = check(ranks, assigned, schedule=REPLICATED, looks=looks)
    for norms in notes:
        assert norms == pytest.approx(expected, rel=1e-4)


class Shared(nn.Module):
    """Reentrant checkpoints add to the gradient of `table` once each, so three times in a backward.

    The first backward has the first time alone, and so finds a place that is too early for the later ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1200))
        self.blocks = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(3))
        self.uses = self.blocks[2:]

    def part(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x) + self.table[:12].sum() * x if block in self.uses else block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(self.part, block, x, use_reentrant=True)
        return x


def shared(s: Session) -> None:
    torch.manual_seed(0)
    s.start(Shared(), units=None)
    s.model.table.register_hook(lambda gradient: 3 * gradient)
    for step in range(3):

        def loss(model: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank), requires_grad=True)
            return model(x).square().mean()

        s.backward(loss)
        s.model.uses = s.model.blocks
        s.backward(loss)
        s.clip(0.5)
        s.step()


def stop(gradient: torch.Tensor) -> None:
    raise InterruptedError


def cleared_after_an_error(s: Session) -> None:
    """All gradients of the backward that raises have come, that of `table` three times."""
    torch.manual_seed(0)
    s.start(Shared(), units=None)

    def loss(model: nn.Module, rank: int, raises: bool = False) -> torch.Tensor:
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        if raises:
            x.register_hook(stop)
        return model(x).square().mean()

    s.backward(loss)
    s.step()
    s.model.uses = s.model.blocks
    if not s.reference:
        with pytest.raises(InterruptedError):
            s.backward(partial(loss, raises=True))
        s.model.zero_grad()
    s.backward(loss)
    s.clip(0.5)
    s.step()


@pytest.mark.parametrize("program", [shared, cleared_after_an_error])
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_a_gradient_that_comes_several_times_in_a_backward_is_whole(ranks, mesh, schedule, program):
    *notes, expected = check(ranks, program, mesh, schedule=schedule)
    for norms in notes:
        assert norms == pytest.approx(expected, rel=1e-4)


def chained(s: Session) -> None:
    """One backward goes through two models, each with an optimizer of its own."""
    first, second = s.another(), s.another()
    first.start(make_gpt(depth=1), units=None)
    second.start(make_gpt(1, depth=1), units=None)
    for step in range(3):
        for rank in first.each_rank():
            tokens = part(batch(step), rank, s.size)
            soft = first.model(tokens[:, :-1]).softmax(-1)
            x = soft @ second.model.embedding.weight
            loss = second.model(tokens[:, :-1]).square().mean() + x.square().mean()
            (loss / (s.size if s.reference else 1)).backward()
        first.step()
        second.step()
    s.initial, s.model = second.initial, second.model
    s.notes.append((first.initial, first.weights()))


@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_one_backward_through_two_models_gives_means_to_both(ranks, mesh, schedule):
    *notes, [(initial, expected)] = check(ranks, chained, mesh, schedule=schedule)
    for [(_, got)] in notes:
        assert_equal_to_reference(initial, expected, got)


def without_its_model(mesh: Any, schedule: Any) -> None:
    """Nobody is left who could average the gradients, which must not stay the ranks' own."""
    s = Session(mesh, schedule)
    s.start(make_gpt(depth=1), units=None)
    s.train(0)
    loss = language_loss(1, s.size)(s.model, s.rank)
    del s.model, s.opt
    gc.collect()
    with pytest.raises(ValueError, match="a backward through a model that Python has freed"):
        loss.backward()


@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_a_backward_after_the_model_is_refused(ranks, mesh, schedule):
    ranks.run(without_its_model, mesh, schedule=schedule)


def narrow(s: Session) -> None:
    s.start(make_gpt(depth=2), units=None, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    s.backward(language_loss(0, s.size))
    s.notes.append(gradients_of(s))
    s.step()


def test_gradients_travel_in_the_dtype_of_reduction(ranks):
    """Some values are none of bf16 in fp32, and all are in 16 bits."""
    *notes, expected = check(ranks, narrow, schedule=REPLICATED, bound=math.inf)
    for [gradients] in notes:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[0][name], rtol=0.02, atol=1e-4)
            assert torch.equal(gradient, gradient.bfloat16().float())
            assert not torch.equal(expected[0][name], expected[0][name].bfloat16().float())
