"""Units that hold a large share of the matrices are warned of where they can be split."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn as nn
from dmuon._running import start
from logged import logged
from models import Block, Gpt, make_gpt
from torch.distributed.fsdp import fully_shard
from training import AHEAD, dedicate

import dmuon


class Decoder(Gpt):
    """Two blocks as attributes of one module, without a list."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        self.blocks = nn.Sequential()
        self.decoder = nn.Module()
        self.decoder.first, self.decoder.second = Block(24, 41), Block(24, 41)
        self.decoder.forward = lambda x: self.decoder.second(self.decoder.first(x))


def warnings(mesh: Any, way: str, least: int = 0) -> list[str]:
    """What Muon warns of on this rank, if units of `least` elements are large."""
    model = Decoder() if way == "attributes in one" else make_gpt(depth=2)
    if way == "list in a list":
        model.blocks = nn.ModuleList([nn.Sequential(*model.blocks)])
    if way == "list in one":
        model.decoder = nn.Module()
        model.decoder.blocks = model.blocks
        model.blocks = nn.ModuleList()
    dedicate(model, mesh, AHEAD)
    if way.endswith("in one"):
        fully_shard(model.decoder, mesh=mesh)
    if way == "fully_shard":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own, start._LEAST_LARGE_UNIT = start._LEAST_LARGE_UNIT, least
    try:
        with logged() as said:
            dmuon.Muon(model)
    finally:
        start._LEAST_LARGE_UNIT = own
    return said


@pytest.mark.parametrize("way", ["fully_shard", "in a list"])
def test_two_blocks_that_are_units_are_as_small_as_advised(ranks, way):
    assert ranks.run(warnings, (2,), way=way) == [[], []]


@pytest.mark.parametrize(
    ("way", "unit"), [("list in one", "decoder"), ("attributes in one", "decoder"), ("list in a list", "blocks.0")]
)
def test_two_blocks_in_one_unit_are_warned_of_at_slot_0(ranks, way, unit):
    (message,), others = ranks.run(warnings, (2,), way=way)
    assert f"'{unit}' (100%)" in message and "Split them" in message
    assert others == []


def test_units_of_few_elements_are_not_warned_of(ranks):
    assert ranks.run(warnings, (2,), way="list in one", least=start._LEAST_LARGE_UNIT) == [[], []]
