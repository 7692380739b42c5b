"""Derivatives by other calls than loss.backward(): of chosen inputs, forward-mode, and torch.func's transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from scenario import Session, check
from torch.autograd import forward_ad
from training import AHEAD, KEPT, NO_COPY, place_of

import dmuon

WIDTH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def drawn(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, WIDTH, generator=generator), torch.randn(5, WIDTH, generator=generator)


def loss_by(way: str, step: int) -> Any:
    """The loss is of the output and of what is not plain about it."""

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        x, y = drawn(step, rank)
        if way == "vmap":
            return (torch.func.vmap(model)(x) - y).square().mean()
        if way == "jvp":
            output, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
            return (output - y + tangent).square().mean()
        if way == "vmap of jvp":
            output, tangent = torch.func.vmap(lambda x: torch.func.jvp(model, (x,), (torch.ones_like(x),)))(x)
            return (output - y + tangent).square().mean()
        with forward_ad.dual_level():
            output, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
            return (output - y + tangent).square().mean()

    return loss


def transformed(s: Session, way: str, fsdp: bool) -> None:
    s.start(make(), names=lambda name: name.endswith("weight"), **({} if fsdp else {"units": None}))
    for step in range(3):
        s.backward(loss_by(way, step))
        s.step()


# torch's custom functions, FSDP2's among them, have no forward mode beside torch.func.
@pytest.mark.parametrize(
    ("way", "fsdp"),
    [("vmap", True), ("jvp", True), ("vmap", False), ("jvp", False), ("vmap of jvp", False), ("dual", False)],
)
@pytest.mark.parametrize("schedule", [AHEAD, NO_COPY, KEPT])
def test_transforms_train_as_on_one_process(ranks, way, fsdp, schedule):
    check(ranks, transformed, schedule=schedule, way=way, fsdp=fsdp)


def tangent_of(model: nn.Module) -> torch.Tensor:
    x, y = drawn(0, 0)
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, y))).tangent.detach()


def test_tangents_pass_through_units():
    model, plain = make(), make()
    dmuon.dedicate_params(model)
    dmuon.Muon(model)
    assert torch.allclose(tangent_of(model), tangent_of(plain), rtol=1e-5, atol=1e-6)


# ---- gradients of chosen inputs ----


def chosen(s: Session, names: list[str], fsdp: bool) -> None:
    model = s.start(make(), names=lambda name: name.endswith("weight"), **({} if fsdp else {"units": None}))
    for step in range(4):
        # Every other step has a whole backward, so passes of both kinds follow each other.
        inputs = {"inputs": [dict(model.named_parameters())[name] for name in names]} if step % 2 == 0 else {}
        s.backward(lambda model, rank, step=step: (model(drawn(step, rank)[0]) - drawn(step, rank)[1]).square().mean(),
                   **inputs)  # fmt: skip
        s.step()


@pytest.mark.parametrize("fsdp", [True, False])
@pytest.mark.parametrize("names", [["blocks.1.up.weight"], ["last.weight", "blocks.0.down.weight"]])
@pytest.mark.parametrize("mesh", [(1,), (2, 2)])
def test_a_backward_to_some_matrices_moves_these_alone(ranks, names, fsdp, mesh):
    check(ranks, chosen, mesh, schedule=AHEAD, names=names, fsdp=fsdp)


def returned_gradients(mesh: Any, fsdp: bool) -> list[torch.Tensor]:
    """What autograd.grad returns on this rank, and that nothing was accumulated."""
    session = Session(mesh, AHEAD)
    model = session.start(make(), **({} if fsdp else {"units": None}))
    rank, _ = place_of(mesh)
    x, y = drawn(0, rank)
    weights = [block.up.weight for block in model.blocks]
    found = torch.autograd.grad((model(x) - y).square().mean(), weights)
    before = session.weights()
    session.step()
    after = session.weights()
    assert all(torch.equal(after[name], before[name]) for name in before)
    return [gradient.clone() for gradient in found]


@pytest.mark.parametrize("fsdp", [True, False])
def test_autograd_grad_returns_this_ranks_gradients(ranks, fsdp):
    for rank, found in enumerate(ranks.run(returned_gradients, (2, 2), fsdp=fsdp)):
        plain = make()
        x, y = drawn(0, rank)
        weights = [block.up.weight for block in plain.blocks]
        expected = torch.autograd.grad((plain(x) - y).square().mean(), weights)
        for gradient, known in zip(found, expected, strict=True):
            assert torch.allclose(gradient, known, rtol=1e-5, atol=1e-6)
