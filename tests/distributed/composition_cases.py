"""Models that use units in unusual ways, and structures that pass between them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from models import Block, Gpt, make_gpt
from scenario import Session, language_loss
from torch.distributed.fsdp import MixedPrecisionPolicy

import dmuon


class _TwicePerForward(Gpt):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(self.norm(x))


def called_twice(s: Session) -> None:
    torch.manual_seed(0)
    s.start(_TwicePerForward(depth=2))
    s.train(0, 1, 2)


def micro_steps(s: Session) -> None:
    s.start(make_gpt(depth=2))
    for step in (0, 2, 4):
        for micro in (0, 1):
            s.backward(language_loss(step + micro, s.size), scale=0.5)
        s.step()


def mixed_precision(s: Session) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = s.start(make_gpt(depth=2), mp_policy=None if s.reference else policy)
    for step in range(4):
        s.train(step)
        with torch.no_grad():
            s.notes.append(float(language_loss(step, s.size)(model, s.rank or 0)))
    if not s.reference:
        s.notes.append({p.dtype for group in s.opt.param_groups for p in group["params"]})
        s.notes.append({str(b.dtype) for state in s.opt.state.values() for b in state.values() if b.ndim == 2})


def tied_across_units(s: Session) -> None:
    model = make_gpt(depth=3)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    s.start(model)
    s.train(0, 1, 2)
    if not s.reference:
        unit = {row.name: row.unit for row in dmuon.routing_table(model)}
        s.notes.append((unit["blocks.0.up.weight"], unit["blocks.0.down.weight"]))


def tied_inside_a_unit(s: Session) -> None:
    model = make_gpt(depth=2)
    for block in model.blocks:
        block.gate = nn.Linear(24, 24, bias=False)
        block.gate.weight = block.out.weight
        block.norm = nn.Sequential(block.norm, block.gate)
    s.start(model)
    s.train(0, 1, 2)
    if not s.reference:
        s.notes.append(all(b.gate.weight is b.out.weight for b in model.blocks))


class _Group(nn.Module):
    """A unit with a matrix of its own around units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.Linear(width, width, bias=False)
        self.inner = nn.ModuleList(Block(width, 41) for _ in range(2))
        self.after = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.before(x)
        for block in self.inner:
            x = block(x)
        return x + self.after(x)


def nested_units(s: Session) -> None:
    torch.manual_seed(0)
    model = Gpt()
    model.blocks = nn.ModuleList([_Group(24), _Group(24)])
    s.start(model, units=lambda m: [module for g in m.blocks for module in (*g.inner, g)])
    s.train(0, 1, 2)


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


def plain_replicas(s: Session) -> None:
    s.start(make_gpt(depth=2), units=None)
    s.train(0, 1, 2)


class _Matrices(nn.Module):
    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def square_loss(step: int) -> Any:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        x = torch.randn(5, 10, generator=torch.Generator().manual_seed(100 * step + rank))
        return (model(x) - x.sum(-1, keepdim=True).sin()).square().mean()

    return loss


def only_matrices(s: Session, sizes: list[int], fsdp: bool = True) -> None:
    """Fewer matrices than ranks too."""
    torch.manual_seed(0)
    s.start(_Matrices(sizes), units=(lambda m: []) if fsdp else None)
    for step in range(3):
        s.backward(square_loss(step))
        s.step()


def no_matrices(s: Session) -> None:
    torch.manual_seed(0)
    model = make_gpt(depth=2)
    s.start(model, names=lambda name: False, dedicate=None if s.reference else {"select": lambda *_: False})
    s.train(0, 1)
    s.backward(language_loss(2, s.size))
    s.clip(0.1)
    s.step()


def two_models(s: Session) -> None:
    """The second model's weights are the ones compared; the first one's go to the notes."""
    first, second = (Session(s.mesh, s.size if s.reference else 0) for _ in range(2))
    first.start(make_gpt(seed=1, depth=1))
    second.start(make_gpt(seed=2, depth=2))
    for step in range(3):
        first.train(step)
        second.train(step + 1)
    s.notes.append((first.initial, first.weights()))
    s.initial, s.model = second.initial, second.model


class _Skips(nn.Module):
    """`blocks` hold nothing but a matrix each; ranks may skip them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(10, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(4))
        self.head = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            if i not in skip:
                x = x + torch.tanh(block(x))
        return self.head(x)


def skipped_units(s: Session, plan: dict[int, dict[int, tuple[int, ...]]], units: bool = False) -> None:
    """`plan[step][rank]`: what the rank skips in that step."""
    torch.manual_seed(0)
    s.start(_Skips(), units=(lambda m: list(m.blocks)) if units else lambda m: [])

    for step in range(5):

        def loss(model: nn.Module, rank: int, step: int = step) -> torch.Tensor:
            x = torch.randn(5, 10, generator=torch.Generator().manual_seed(100 * step + rank))
            skip = plan.get(step, {}).get(rank, ())
            return (model(x, skip) - x.sum(-1, keepdim=True).sin()).square().mean()

        s.backward(loss)
        s.step()
