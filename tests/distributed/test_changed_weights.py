"""Weights that a module changes in its forward: owners take the change over, or all ranks raise."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Gpt, batch, loss_of, make_gpt, part
from pool import RankFailed
from refusals import REFUSED, Refusals, expect_refusal
from scenario import Session, check, language_loss
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint
from training import AHEAD, KEPT, NO_COPY, ON_DEMAND, dedicate, place_of, weights_of

import dmuon

refused = Refusals()


class Changing(nn.Linear):
    """Changes its weight before it uses it."""

    way = "in place"
    call = 1  # by one rank: which one
    rank = 0
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.change()
        return super().forward(x)

    @torch.no_grad()
    def change(self) -> None:
        if self.way == "in place":
            self.weight.clamp_(-0.1, 0.1)
        elif self.way == "data":
            self.weight.data.clamp_(-0.1, 0.1)
        elif self.way == "assigned":
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        elif self.way == "detached":
            self.weight.detach().mul_(0.97)
        elif self.way == "once" and self.calls == 1:
            self.weight.mul_(0.5)
        elif self.way == "in training" and torch.is_grad_enabled():
            self.weight.div_(self.weight.norm(dim=0, keepdim=True))
        elif self.way == "read only":
            assert self.weight.data.isfinite().all() and self.weight.data.shape == self.weight.shape
        elif self.way == "by its rank":
            self.weight.mul_(1 - 0.1 * self.rank)
        elif self.way == "by one rank" and self.rank == 1 and self.calls == self.call:
            self.weight.mul_(0.9)
        elif self.way == "wrong shape":
            self.weight.data = self.weight.data[1:]


def changing_gpt(way: str, rank: int = 0) -> Gpt:
    torch.manual_seed(0)
    model = Gpt(depth=2)
    for block in model.blocks:
        block.up = Changing(24, 41)
        block.up.way, block.up.rank = way, rank
    return model


def changing(s: Session, way: str, fsdp: bool = True, recomputes: str = "", frozen: bool = False) -> None:
    """`recomputes`: the module of each block, or the "block", that a checkpoint repeats in the backward.

    `frozen`: the inputs of the first block need no gradient.
    """
    model = changing_gpt(way)
    model.embedding.requires_grad_(not frozen)
    for block in model.blocks if recomputes else ():
        module = block if recomputes == "block" else block.get_submodule(recomputes)
        forward = module.forward
        module.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    s.start(model, **({} if fsdp else {"units": None}))
    for step in range(3):
        with torch.no_grad():
            s.notes.append(float(sum(loss_of(model, part(batch(50), rank, s.size)) for rank in range(s.size))))
        s.backward(language_loss(step, s.size), 0.5)
        s.backward(language_loss(10 + step, s.size), 0.5)
        s.step()


@pytest.mark.parametrize("schedule", [AHEAD, NO_COPY, KEPT, ON_DEMAND])
@pytest.mark.parametrize("way", ["in place", "assigned"])
def test_a_change_outlives_the_forward(ranks, way, schedule):
    *notes, expected = check(ranks, changing, schedule=schedule, way=way)
    assert all(note == pytest.approx(expected, rel=1e-3) for note in notes)


class Chain(nn.Module):
    """Calls the linears of its layers, and never the layers."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.layers = nn.ModuleList(nn.Sequential(Changing(24, 24)) for _ in range(3))
        self.register_buffer("mean", torch.zeros(24, 24))
        self.head = nn.Linear(24, 4)
        for layer in self.layers:
            layer[0].way = "" if way.startswith("parent") or way in ("copied", "lists") else way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "lists":
            with torch.no_grad():
                torch._foreach_mul_([layer[0].weight for layer in self.layers], 0.9)
                torch._foreach_add_([self.mean, self.layers[0][0].weight], 0.01)
        for (linear,) in self.layers:
            if self.way.startswith("parent"):
                with torch.no_grad():
                    self.of_parent(linear)
            x = torch.tanh(linear(x))
        if self.way == "copied":
            self.mean.lerp_(self.layers[1][0].weight.detach(), 0.5)
            torch.mul(self.layers[0][0].weight.detach(), 0.1, out=self.mean[:])
            self.mean[:4] += self.layers[2][0].weight.detach()[:4]
        return self.head(x) + self.mean.sum(0)[:4]

    def of_parent(self, linear: nn.Linear) -> None:
        if self.way == "parent":
            linear.weight.clamp_(-0.1, 0.1)
        elif self.way == "parent of a row":
            linear.weight[3].mul_(0.5)
            linear.weight[:, 2] = 0.01
        elif self.way == "parent by data":
            linear.weight.data = linear.weight.data.clamp(-0.1, 0.1)


def chained(s: Session, way: str) -> None:
    s.start(Chain(way), units=None, names=lambda name: "layers" in name and name.endswith("weight"))

    def loss(step: int) -> Any:
        def of(model: nn.Module, rank: int) -> torch.Tensor:
            x = torch.randn(6, 24, generator=torch.Generator().manual_seed(100 * step + rank))
            return model(x).square().mean()

        return of

    for step in range(3):
        s.backward(loss(step))
        s.step()


# The reference calls the model once for each rank, so changes that add up over calls fit a mesh of one rank alone.
@pytest.mark.parametrize(
    ("way", "mesh"),
    [
        *((way, (2, 2)) for way in ("in place", "assigned", "data", "parent", "parent by data")),
        *((way, (1,)) for way in ("detached", "once", "parent of a row", "copied", "lists")),
    ],
)
def test_before_anyone_knows_who_reads_the_weights(ranks, way, mesh):
    check(ranks, chained, mesh, schedule=AHEAD, way=way)


def kept_aside(mesh: Any) -> str:
    """A module uses the parameter that it has kept since before dedicate_params."""
    model = make_gpt(depth=1)
    kept = model.blocks[0].out.weight
    forward = model.forward
    dedicate(model, mesh, AHEAD)
    dmuon.Muon(model)
    model.forward = lambda x: forward(x) + kept.sum()
    try:
        loss_of(model, batch(0)).backward()
    except ValueError as error:
        assert kept.grad is None
        return str(error)
    return ""


def test_a_parameter_of_before_dedicate_params_is_not_trained_in_silence(ranks):
    for message in ranks.run(kept_aside, (2, 2)):
        assert "the parameter that was 'blocks.0.out.weight' before dedicate_params, which nothing trains" in message


# The reference calls the model once for each rank's part of the batch, so only a mesh of one rank fits "detached".
WAYS = [(way, mesh) for way in ("data", "detached", "once", "in training", "read only") for mesh in ((1,), (2, 2))]
WAYS.remove(("detached", (2, 2)))


@pytest.mark.parametrize(("way", "mesh"), WAYS)
def test_in_every_way(ranks, way, mesh):
    check(ranks, changing, mesh, schedule=AHEAD, way=way, fsdp=mesh != (1,))


@pytest.mark.parametrize(("recomputes", "frozen"), [("block", False), ("up", False), ("up", True)])
@pytest.mark.parametrize(("way", "mesh", "fsdp"), [("in place", (2, 2), True), ("detached", (1,), False)])
def test_a_recomputation_changes_it_again(ranks, way, mesh, fsdp, recomputes, frozen):
    check(ranks, changing, mesh, schedule=AHEAD, way=way, fsdp=fsdp, recomputes=recomputes, frozen=frozen)


@refused("ranks disagree", "a change of weights of 'blocks.0' in a forward", "alike on all ranks", way="by its rank")
@refused("ranks disagree", "a change of weights of 'blocks.0' in a forward", "alike on all ranks", way="by one rank")
@refused("assigning .data of a weight: expected shape (41, 24), got (40, 24)", way="wrong shape")
def changed_wrongly(mesh: Any, way: str, call: int = 1, fsdp: bool = True) -> None:
    rank, _ = place_of(mesh)
    session = Session(mesh, AHEAD)
    model = changing_gpt(way, rank)
    for block in model.blocks:
        block.up.call = call
    session.start(model, **({} if fsdp else {"units": None}))
    session.train(*range(call))


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


@pytest.mark.parametrize("fsdp", [True, False])
def test_a_rank_that_changes_weights_alone_in_a_replay_is_named_to_all(ranks, fsdp):
    """The others compare nothing there, and go on until they need the rank."""
    begun = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        ranks.run(changed_wrongly, (2, 2), way="by one rank", call=4, fsdp=fsdp)
    told = [part for part in str(failed.value).split("--- rank ") if part.strip()]
    assert len(told) == 4 and time.monotonic() - begun < 60
    named = ["a change of weights of 'blocks.0' in a forward" in part for part in told]
    assert any(named) if fsdp else all(named)  # gloo's own error may come first in FSDP2's collectives


def after_an_error(s: Session) -> None:
    """The forward runs while the caller handles an error, as a retry with a smaller batch does."""
    s.start(changing_gpt("in place"))
    for step in range(3):
        try:
            raise RuntimeError("out of memory")
        except RuntimeError:
            s.backward(language_loss(step, s.size))
        s.step()


def test_a_change_counts_inside_of_an_except_block(ranks):
    check(ranks, after_an_error, schedule=AHEAD)


def bf16(mesh: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(A master before and after a module changes its first row, where weights travel in bf16.)"""
    model = changing_gpt("none")
    session = Session(mesh, AHEAD)
    session.start(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    before = weights_of(model)["blocks.0.up.weight"]

    def change(self: Changing) -> None:
        with torch.no_grad():
            self.weight[0].fill_(0.25)

    Changing.change, kept = change, Changing.change
    try:
        loss_of(model, part(batch(0), *place_of(mesh)))
    finally:
        Changing.change = kept
    return before, weights_of(model)["blocks.0.up.weight"]


def test_masters_keep_the_bits_of_what_has_not_changed(ranks):
    for before, after in ranks.run(bf16, (2, 2)):
        assert torch.equal(after[1:], before[1:]) and (after[0] == 0.25).all()
        assert not torch.equal(before, before.bfloat16().float())
