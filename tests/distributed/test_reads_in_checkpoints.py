"""A block's weight that other blocks read inside of activation checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from scenario import Session, blocks_of, check
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from training import AHEAD, FAR_AHEAD, KEPT, KEPT_NO_COPY, NO_COPY, ON_DEMAND

import dmuon

WIDTH = 12
BLOCKS = range(4)


class Block(nn.Module):
    """Reads a slice of other blocks' weights, or calls their layers, in its own forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.how = how
        self.lenders: list[Block] = []  # a list of its own in each block, so that no module holds another
        self.reads = True

    def forward(self, x: torch.Tensor, *views: torch.Tensor) -> torch.Tensor:
        y = x + self.down(torch.tanh(self.up(x)))
        if not self.reads:
            return y
        for lender in self.lenders[0] if self.lenders else ():
            y = y + 0.3 * (lender.down(lender.up(x)) if self.how == "called" else x @ lender.down.weight[:, :WIDTH].T)
        return y + sum(0.3 * x @ view.T for view in views)


# Which blocks read which.
READS: dict[str, dict[int, list[int]]] = {
    "earlier": {1: [0], 2: [0], 3: [0]},
    "later": {0: [3], 1: [3], 2: [3]},
    "both": {0: [1, 2, 3], 1: [0, 2, 3], 2: [0, 1, 3], 3: [0, 1, 2]},
    "one": {3: [1]},
}


class Model(nn.Module):
    """`around` runs blocks by numbers, and so says where checkpoints are."""

    def __init__(self, around: str, reads: str = "earlier", how: str = "sliced", frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block(how) for _ in BLOCKS)
        self.head = nn.Linear(WIDTH, 20)
        self.how, self.run = how, AROUND[around]
        self.embedding.weight.requires_grad_(not frozen)
        for reader, lenders in READS[reads].items():
            self.blocks[reader].lenders = [[self.blocks[lender] for lender in lenders]]
        INSIDE.get(around, lambda blocks: None)(self.blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        views = (self.blocks[1].down.weight[:, WIDTH:],) if self.how == "passed" else ()
        runs = [lambda x, block=block: block(x, *views) for block in self.blocks]
        return self.head(self.run(runs, x))


def one_by_one(runs: list[Callable[..., Any]], x: torch.Tensor) -> torch.Tensor:
    for run in runs:
        x = run(x)
    return x


def checkpoint_each(reentrant: bool, which: Any = BLOCKS) -> Any:
    def run(runs: list[Callable[..., Any]], x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(runs):
            x = checkpoint(block, x, use_reentrant=reentrant) if index in which else block(x)
        return x

    return run


def checkpoint_pairs(reentrant: bool) -> Any:
    def run(runs: list[Callable[..., Any]], x: torch.Tensor) -> torch.Tensor:
        for pair in (runs[:2], runs[2:]):
            x = checkpoint(one_by_one, pair, x, use_reentrant=reentrant)
        return x

    return run


def nested(runs: list[Callable[..., Any]], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(checkpoint_pairs(reentrant=False), runs, x, use_reentrant=False)


def nested_reentrant(runs: list[Callable[..., Any]], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(checkpoint_each(reentrant=True), runs, x, use_reentrant=True)


AROUND: dict[str, Any] = {
    "nothing": one_by_one,
    "each": checkpoint_each(reentrant=False),
    "each, reentrant": checkpoint_each(reentrant=True),
    "readers": checkpoint_each(reentrant=False, which=(1, 2, 3)),
    "lenders": checkpoint_each(reentrant=False, which=(0,)),
    "lenders, reentrant": checkpoint_each(reentrant=True, which=(0,)),
    "pairs": checkpoint_pairs(reentrant=False),
    "pairs, reentrant": checkpoint_pairs(reentrant=True),
    "nested": nested,
    "nested, reentrant": nested_reentrant,
    "wrapped": one_by_one,
    "inside": one_by_one,
    "inside, reentrant": one_by_one,
}


def checkpoint_inside(reentrant: bool) -> Any:
    def change(blocks: nn.ModuleList) -> None:
        for block in blocks:
            plain = block.forward
            block.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=reentrant)

    return change


def wrap(blocks: nn.ModuleList) -> None:
    for index, block in enumerate(list(blocks)):
        blocks[index] = checkpoint_wrapper(block)


INSIDE = {
    "wrapped": wrap,
    "inside": checkpoint_inside(reentrant=False),
    "inside, reentrant": checkpoint_inside(reentrant=True),
}


def is_matrix(name: str) -> bool:
    return name.startswith("blocks") and name.endswith("weight")


def loss_of(step: int) -> Any:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        tokens = torch.randint(20, (8,), generator=torch.Generator().manual_seed(100 * step + rank))
        return F.cross_entropy(model(tokens), (tokens + 1) % 20)

    return loss


def train(s: Session, wrapping: str = "none", **model: Any) -> None:
    torch.manual_seed(0)
    s.start(Model(**model), units={"none": None, "blocks": blocks_of}[wrapping], names=is_matrix)
    for step in range(4):
        s.backward(loss_of(step))
        s.step()


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("around", AROUND)
def test_equal_a_single_process(ranks, around, reads):
    check(ranks, train, schedule=AHEAD, around=around, reads=reads)


@pytest.mark.parametrize("how", ["called", "passed"])
@pytest.mark.parametrize("around", ["each", "pairs", "inside", "nested, reentrant"])
def test_layers_that_are_called_and_views_from_outside(ranks, around, how):
    check(ranks, train, schedule=AHEAD, around=around, reads="both", how=how)


@pytest.mark.parametrize("schedule", [ON_DEMAND, FAR_AHEAD, KEPT, NO_COPY, KEPT_NO_COPY])
@pytest.mark.parametrize("around", ["wrapped", "pairs", "inside"])
def test_under_other_schedules(ranks, around, schedule):
    check(ranks, train, schedule=schedule, around=around, reads="both")


@pytest.mark.parametrize("reads", ["earlier", "both"])
@pytest.mark.parametrize("around", ["each", "pairs", "inside"])
def test_blocks_whose_first_inputs_need_no_gradient(ranks, around, reads):
    check(ranks, train, schedule=AHEAD, around=around, reads=reads, frozen=True)


@pytest.mark.parametrize("reads", ["earlier", "later"])
@pytest.mark.parametrize("around", ["each", "pairs", "inside"])
def test_under_fully_shard(ranks, around, reads):
    check(ranks, train, schedule=AHEAD, around=around, reads=reads, wrapping="blocks")


def kept_graph(s: Session, step: int) -> None:
    s.backward(lambda model, rank: loss_of(step)(model, rank), retain_graph=True)


def twice(s: Session, step: int) -> None:
    """Two backwards through one graph."""
    for rank in s.each_rank():
        loss = loss_of(step)(s.model, rank) / (s.size if s.reference else 1)
        loss.backward(retain_graph=True)
        loss.backward()


def micro_steps(s: Session, step: int) -> None:
    for i in range(2):
        with nullcontext() if i or s.reference else dmuon.no_sync(s.model):
            s.backward(loss_of(10 * step + i), 0.5)
    s.backward(loss_of(10 * step + 2), 0.5)


def reads_now_and_then(s: Session, step: int) -> None:
    for block in s.model.blocks:
        block.reads = step % 3 != 1
    s.backward(loss_of(step))


def reads_from_later_on(s: Session, step: int) -> None:
    for block in s.model.blocks:
        block.reads = step >= 2
    s.backward(loss_of(step))


WAYS = [kept_graph, twice, micro_steps, reads_now_and_then, reads_from_later_on]


def in_a_way(s: Session, way: int, **model: Any) -> None:
    torch.manual_seed(0)
    s.start(Model(**model), units=None, names=is_matrix)
    for step in range(6):
        WAYS[way](s, step)
        s.step()


@pytest.mark.parametrize("schedule", [AHEAD, KEPT])
@pytest.mark.parametrize("around", ["each", "pairs", "inside"])
@pytest.mark.parametrize("way", range(len(WAYS)), ids=lambda way: WAYS[way].__name__)
def test_train_in_other_ways(ranks, way, around, schedule):
    check(ranks, in_a_way, schedule=schedule, way=way, around=around)
