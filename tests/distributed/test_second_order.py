"""Gradients of gradients, as force matching and gradient penalties need them; and outputs that are views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from refusals import REFUSED, Refusals, expect_refusal
from scenario import Session, check
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from training import AHEAD, KEPT, KEPT_NO_COPY, NO_COPY, ON_DEMAND, dedicate

import dmuon

WIDTH = 16
refused = Refusals()


class Block(nn.Module):
    """Its output is a view, or a slice of a larger tensor, that the model changes in place."""

    def __init__(self, returns: str = "sum", checkpoints: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH, bias=False)
        self.returns, self.checkpoints = returns, checkpoints

    def forward(self, x: torch.Tensor) -> Any:
        x = x + (checkpoint(self.mlp, x, use_reentrant=False) if self.checkpoints else self.mlp(x))
        if self.returns == "view":
            return x.view(2, -1, WIDTH)
        if self.returns == "slice":
            return torch.cat([x, x.square()])[: len(x)]
        if self.returns == "base too":
            self.last = x
            return x.view(2, -1, WIDTH)
        if self.returns == "tuple":
            return x.view(2, -1, WIDTH), {"more": (2 * x).view(2, -1, WIDTH)}
        return x

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """`reads`: the model computes its blocks itself. Nobody knows that it reads their weights before it does."""

    def __init__(self, reads: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(8, WIDTH), nn.ModuleList(Block(**options) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.reads:
            for block in self.blocks:
                x = checkpoint(block.mlp, x, use_reentrant=False) if block.checkpoints else self.mlp_of(block, x)
            return self.head(x)
        for block in self.blocks:
            x = block(x)
            if block.returns == "tuple":
                x, more = x[0], x[1]["more"]
                more.mul_(0.1)
                x += more
            elif block.returns != "sum":
                x *= 0.9
            x = x.reshape(-1, WIDTH)
        last = sum(block.last.square().mean() for block in self.blocks if block.returns == "base too")
        return self.head(x) + last

    @staticmethod
    def mlp_of(block: Block, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(torch.tanh(F.linear(x, block.up.weight, block.up.bias)), block.down.weight)


class ForceField(nn.Module):
    """Differentiates in its own forward, as models of molecules do."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net = Model(**options)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.net(x)
        return out, torch.autograd.grad(out.sum(), x, create_graph=True)[0]


def is_matrix(name: str) -> bool:
    return name.endswith("weight") and "head" not in name


def drawn(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 8, generator=source), torch.randn(6, 4, generator=source)


def forces(step: int, way: str) -> Any:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        x, y = drawn(step, rank)
        x.requires_grad_()
        if isinstance(model, ForceField):
            out, force = model(x)
        else:
            out = model(x)
            (force,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        if way == "curvature":
            (force,) = torch.autograd.grad((force * x.detach()).sum(), x, create_graph=True)
        result = (force - y.repeat(1, 2)).square().mean()
        if way == "energy too":
            result = result + F.mse_loss(out, y)
        if way == "third order":
            (curvature,) = torch.autograd.grad(force.square().sum(), x, create_graph=True)
            result = result + 0.1 * curvature.square().mean()
        return result

    return loss


def penalised(s: Session, step: int, first: str) -> Any:
    """The loss, and a penalty on its gradient, in two backwards through one graph (R1 of GANs)."""

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        x, y = drawn(step, rank)
        x.requires_grad_()
        out = model(x)
        fit = F.mse_loss(out, y) / (s.size if s.reference else 1)
        if first == "fit":
            fit.backward(retain_graph=True)
        penalty = 0.1 * torch.autograd.grad(out.sum(), x, create_graph=True)[0].square().sum()
        if first == "graph":
            fit.backward(retain_graph=True)
        return penalty

    return loss


def matches_penalties(s: Session, first: str, **options: Any) -> None:
    s.start(Model(**options), units=None, names=is_matrix)
    for step in range(3):
        s.backward(penalised(s, step, first))
        s.step()
        s.backward(penalised(s, 10 + step, first))
        s.backward(forces(20 + step, "energy too"), 0.5)
        s.step()


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("first", ["fit", "graph"])
def test_a_loss_and_a_penalty_share_a_graph(ranks, first, reads, checkpoints):
    check(ranks, matches_penalties, schedule=KEPT, first=first, reads=reads, checkpoints=checkpoints)


def matches_forces(s: Session, way: str = "", field: bool = False, **options: Any) -> None:
    s.start(ForceField(**options) if field else Model(**options), units=None, names=is_matrix)
    for step in range(3):
        s.backward(forces(step, way), 0.5)
        s.backward(forces(10 + step, way), 0.5)
        s.clip(5.0)
        s.opt.step()
        s.opt.zero_grad()
        x, _ = drawn(50, 0)
        x.requires_grad_()  # forces in an evaluation
        out = s.model(x)
        s.notes.append(float((out[1] if field else torch.autograd.grad(out.sum(), x)[0]).norm()))


@pytest.mark.parametrize("mesh", [(1,), (4,), (2, 2)])
@pytest.mark.parametrize("way", ["", "energy too", "third order"])
def test_gradients_of_gradients_equal_a_single_process(ranks, mesh, way):
    *notes, expected = check(ranks, matches_forces, mesh, schedule=KEPT, way=way)
    assert all(note == pytest.approx(expected, rel=1e-3) for note in notes)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_without_node_copies_and_under_checkpoints(ranks, checkpoints):
    check(ranks, matches_forces, schedule=KEPT_NO_COPY, way="energy too", checkpoints=checkpoints)


@pytest.mark.parametrize("field", [False, True])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_of_weights_that_nobody_is_known_to_read(ranks, field, reads, checkpoints):
    for way in ["", "curvature"]:
        check(ranks, matches_forces, schedule=KEPT, way=way, field=field, reads=reads, checkpoints=checkpoints)


def routed_while_computing(s: Session, way: str) -> None:
    """How many units are routed before an ordinary backward reaches the model's input."""
    s.start(Model(), units=None, names=is_matrix)
    for kind in ("ordinary", way, "ordinary", "ordinary"):
        s.backward(forces(0, "") if kind == "forces" else penalised(s, 0, "fit") if kind == "retained" else routed(s))
        s.step()


def routed(s: Session) -> Any:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        x, y = drawn(1, rank)
        value = F.mse_loss(model(x.requires_grad_()), y)
        if not s.reference:
            before = s.opt.stats()["routes"]
            x.register_hook(lambda _: s.notes.append(s.opt.stats()["routes"] - before))
        return value

    return loss


@pytest.mark.parametrize("way", ["forces", "retained"])
def test_ordinary_backwards_route_while_they_compute_again(ranks, way):
    for first, *others in check(ranks, routed_while_computing, schedule=KEPT, way=way)[:-1]:
        assert others == [first, first] and first > 0


@refused("a backward with create_graph=True", "dedicate_params(..., reshard_after_forward=False)", schedule=AHEAD)
@refused("create_graph=True", "reshard_after_forward=False", schedule=AHEAD, reads=True)
@refused("create_graph=True", "reshard_after_forward=False", schedule=AHEAD, reads=True, field=True)
@refused("create_graph=True", "reshard_after_forward=False", schedule=AHEAD, checkpoints=True, field=True)
@refused("create_graph=True", "reshard_after_forward=False", schedule=AHEAD, reads=True, checkpoints=True, field=True)
@refused("create_graph=True under fully_shard", "dmuon without fully_shard", schedule=KEPT, fsdp=True)
@refused("functional_call inside a transform of torch.func", "'stem.weight'", schedule=KEPT, way="func", fsdp=True)
@refused("functional_call inside a transform of torch.func", "torch.autograd.grad", schedule=KEPT, way="func")
@refused("a gradient of torch.func, whose result", "under fully_shard", schedule=KEPT, way="func of inputs", fsdp=True)
@refused("create_graph=True has given gradients to matrices", "torch.autograd.grad", schedule=KEPT, way="backward")
def not_possible(
    mesh: Any, schedule: dict[str, Any], fsdp: bool = False, way: str = "", field: bool = False, **options: Any
) -> None:
    model = ForceField(**options) if field else Model(**options)
    dedicate(model, mesh, schedule)
    if fsdp:
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    opt = dmuon.Muon(model)
    if way == "backward":
        model(drawn(0, 0)[0]).sum().backward(create_graph=True)
    elif way == "func of inputs":
        x = drawn(0, 0)[0]
        torch.func.grad(lambda x: model(x).sum())(x).square().sum().backward()
    elif way == "func":
        x = drawn(0, 0)[0]
        torch.func.grad(lambda weights: functional_call(model, weights, (x,)).sum())(dict(model.named_parameters()))
    else:
        forces(0, way)(model, 0).backward()
    opt.step()


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


def of_views(s: Session, returns: str, wrapping: str) -> None:
    units = {"none": None, "blocks": lambda model: model.blocks, "root": lambda model: []}[wrapping]
    s.start(Model(returns=returns), units=units, names=is_matrix)

    def loss(step: int) -> Any:
        def of(model: nn.Module, rank: int) -> torch.Tensor:
            x, y = drawn(step, rank)
            return F.mse_loss(model(x), y)

        return of

    for step in range(3):
        s.backward(loss(step))
        s.step()


@pytest.mark.parametrize("wrapping", ["none", "blocks", "root"])
@pytest.mark.parametrize("returns", ["view", "slice", "tuple", "base too"])
def test_outputs_that_are_views_may_be_changed_in_place(ranks, returns, wrapping):
    schedule = {"view": AHEAD, "slice": NO_COPY, "tuple": ON_DEMAND, "base too": KEPT}[returns]
    check(ranks, of_views, schedule=schedule, returns=returns, wrapping=wrapping)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.up(x).to_sparse(), torch.nested.as_nested_tensor([self.up(x), self.up(x[:1])], layout=torch.jagged)


@pytest.mark.cpu("no sparse tensors on the emulated device")
def test_outputs_without_storage_pass():
    model = nn.Sequential(Sparse())
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    sparse, nested = model(torch.ones(3, 4))
    (sparse.to_dense().sum() + nested.values().sum()).backward()
    opt.step()
