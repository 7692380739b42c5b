"""Activation checkpointing and torch.compile around and inside units."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from models import Block, Gpt
from scenario import Session
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop


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


class _InsideBlock(Block):
    options: dict[str, Any]

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = checkpoint(lambda y: self.qkv(self.norm(y)), x, **self.options).chunk(3, -1)
        x = x + self.out(q * k + v)
        return x + checkpoint(self._mlp, x, **self.options)


def outside(s: Session, options: dict[str, Any], group: int = 1, early_stop: bool = True) -> None:
    torch.manual_seed(0)
    s.start(_Rematerialised(options, group))
    with set_checkpoint_early_stop(early_stop):
        s.train(0, 1, 2)


def inside(s: Session, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Gpt()
    model.blocks = nn.ModuleList(_InsideBlock(24, 41) for _ in range(3))
    for block in model.blocks:
        block.options = options
    s.start(model)
    s.train(0, 1, 2)


def wrapped(s: Session) -> None:
    torch.manual_seed(0)
    model = Gpt()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    s.start(model)
    s.train(0, 1, 2)


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
