"""Structures of tensors that pass between units: weights equal a single process."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from models import Block, Gpt
from scenario import Session, check
from training import AHEAD, FAR_AHEAD, KEPT, NO_COPY, ON_DEMAND


class _Pair(NamedTuple):
    x: torch.Tensor
    count: int


@dataclasses.dataclass
class _Record:
    hidden: Any
    name: str = "hidden"


@dataclasses.dataclass(frozen=True)
class _Frozen:
    hidden: torch.Tensor
    others: tuple[Any, ...] = ()


_WRAPPERS = {
    "dict": (lambda x: {"x": x, "n": 1}, lambda v: v["x"]),
    "list": (lambda x: [None, [x]], lambda v: v[1][0]),
    "dataclass": (lambda x: _Record({"x": (x,)}), lambda v: v.hidden["x"][0]),
    "frozen": (lambda x: _Frozen(x, (x, 2)), lambda v: (v.hidden + v.others[0]) / 2),
    "named": (lambda x: _Pair(x, 1), lambda v: v.x),
}


class _Structured(Block):
    kind = ""

    def forward(self, value: Any, *, extra: Any = None) -> Any:
        wrap, unwrap = _WRAPPERS[self.kind]
        x = unwrap(value)
        return wrap(super().forward(x if extra is None else (x + unwrap(extra)) / 2))


class _StructuredGpt(Gpt):
    kind = ""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        wrap, unwrap = _WRAPPERS[self.kind]
        first = value = wrap(self.embedding(tokens))
        for block in self.blocks:
            value = block(value, extra=first)
        return self.head(self.norm(unwrap(value)))


def structures(s: Session, kind: str) -> None:
    torch.manual_seed(0)
    model = _StructuredGpt()
    model.kind = kind
    model.blocks = nn.ModuleList(_Structured(24, 41) for _ in range(3))
    for block in model.blocks:
        block.kind = kind
    s.start(model)
    s.train(0, 1, 2)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("dict", AHEAD), ("list", ON_DEMAND), ("dataclass", KEPT), ("frozen", NO_COPY), ("named", FAR_AHEAD)],
)
def test_structures_as_inputs_and_outputs(ranks, kind, schedule):
    check(ranks, structures, schedule=schedule, kind=kind)
