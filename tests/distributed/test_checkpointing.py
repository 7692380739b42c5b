"""Weights equal a single process where forwards are recomputed or compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Block, Gpt
from scenario import Session, check
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from training import AHEAD, FAR_AHEAD, KEPT, KEPT_NO_COPY, NO_COPY, ON_DEMAND, REPLICATED


class _Rematerialised(Gpt):
    """Checkpoints one block or several blocks at a time."""

    def __init__(self, options: dict[str, Any], group: int = 1) -> None:
        super().__init__()
        self.options, self.group = options, group

    def _run(self, x: torch.Tensor, begin: int) -> torch.Tensor:
        for block in self.blocks[begin : begin + self.group]:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for begin in range(0, len(self.blocks), self.group):
            x = checkpoint(self._run, x, begin, **self.options)
        return self.head(self.norm(x))


def outside(s: Session, options: dict[str, Any], group: int = 1, early_stop: bool = True) -> None:
    torch.manual_seed(0)
    s.start(_Rematerialised(options, group))
    with set_checkpoint_early_stop(early_stop):
        s.train(0, 1, 2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("group", "schedule"), [(1, ON_DEMAND), (2, FAR_AHEAD)])
def test_recomputed_blocks(ranks, reentrant, group, schedule):
    check(ranks, outside, schedule=schedule, options={"use_reentrant": reentrant}, group=group)


def test_recomputation_that_runs_to_its_end(ranks):
    check(ranks, outside, schedule=KEPT, options={"use_reentrant": False}, early_stop=False)


class _InsideBlock(Block):
    options: dict[str, Any]

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = checkpoint(lambda y: self.qkv(self.norm(y)), x, **self.options).chunk(3, -1)
        x = x + self.out(q * k + v)
        return x + checkpoint(self._mlp, x, **self.options)


def inside(s: Session, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Gpt()
    model.blocks = nn.ModuleList(_InsideBlock(24, 41) for _ in range(3))
    for block in model.blocks:
        block.options = options
    s.start(model)
    s.train(0, 1, 2)


@pytest.mark.parametrize(("reentrant", "schedule"), [(True, KEPT_NO_COPY), (False, NO_COPY)])
def test_recomputation_inside_a_block(ranks, reentrant, schedule):
    check(ranks, inside, schedule=schedule, options={"use_reentrant": reentrant})


def wrapped(s: Session) -> None:
    torch.manual_seed(0)
    model = Gpt()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    s.start(model)
    s.train(0, 1, 2)


def test_checkpoint_wrapper(ranks):
    check(ranks, wrapped, schedule=AHEAD)


def compiled(s: Session, whole_model: bool = False) -> None:
    torch.manual_seed(0)
    model = s.start(Gpt(depth=2))
    if not s.reference:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for module in [model] if whole_model else model.blocks:
            module.compile(backend="aot_eager")
    s.train(0, 1, 2)
    assert s.reference or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    with torch.no_grad():
        model(torch.zeros(1, 3, dtype=torch.long))
    s.train(3)


@pytest.mark.xdist_group("compiles")  # what a first compilation prepares is there for the second
@pytest.mark.parametrize(
    ("mesh", "whole_model", "schedule"), [((2, 2), False, AHEAD), ((2,), True, KEPT), ((2,), True, REPLICATED)]
)
def test_compiled(ranks, mesh, whole_model, schedule):
    check(ranks, compiled, mesh, schedule=schedule, whole_model=whole_model)
