"""Modules that change their inputs in place: later uses of the caller's tensor have the gradients of what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from models import VOCABULARY, batch, loss_of
from refusals import REFUSED, Refusals, expect_refusal
from scenario import Session, blocks_of, check
from training import AHEAD, KEPT, REPLICATED

import dmuon

WIDTH = 12


class Block(nn.Module):
    def __init__(self, by_weights: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.by_weights = by_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(torch.relu(x)))  # whose backward needs x no more
        if self.by_weights:
            x += y
        else:
            x.mul_(0.5)
        return y


class InPlace(nn.Module):
    """The caller of each block goes on with what the block has written."""

    def __init__(self, by_weights: bool, view: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(by_weights) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.view = view

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * 1.0
        for block in self.blocks:
            given = x.view(-1, WIDTH) if self.view else x
            x = (block(given) + given).view(x.shape)
        return self.head(x)


def changed_inputs(s: Session, **kind: bool) -> None:
    s.start(InPlace(**kind), units=None)
    s.train(0, 1, 2)


@pytest.mark.parametrize(
    ("mesh", "schedule", "kind"),
    [
        ((2, 2), AHEAD, {"by_weights": True}),
        ((2, 2), REPLICATED, {"by_weights": False}),
        ((4,), KEPT, {"by_weights": True, "view": True}),
        ((1,), AHEAD, {"by_weights": False, "view": True}),
    ],
)
def test_later_uses_of_the_input_have_the_gradients_of_what_it_holds(ranks, mesh, schedule, kind):
    check(ranks, changed_inputs, mesh, schedule=schedule, **kind)


refused = Refusals()


@refused("'blocks.0' has changed an input in place, of which fully_shard has made a view")
def under_fully_shard(mesh: Any) -> None:
    s = Session(mesh, AHEAD)
    model = s.start(InPlace(by_weights=False), units=blocks_of)
    loss_of(model, batch(0)).backward()


@refused("has changed an input in place, a leaf that requires a gradient", "x = x + y in place of x += y")
def of_a_leaf(mesh: Any) -> None:
    model = InPlace(by_weights=False)
    dmuon.dedicate_params(model, mesh)
    dmuon.Muon(model)
    model.blocks[0](torch.ones(2, WIDTH, requires_grad=True))


@pytest.mark.parametrize(REFUSED, refused)
def test_what_autograd_forbids_is_refused_by_name(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
