"""Weights equal a single process where models use their modules in unusual ways."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from models import Block, Gpt, Matrices, make_gpt, square_loss
from scenario import LossOf, Session, assert_equal_to_reference, check, language_loss
from torch.distributed.fsdp import fully_shard
from training import AHEAD, FAR_AHEAD, KEPT, KEPT_NO_COPY, LR, NO_COPY, ON_DEMAND, WEIGHT_DECAY, dedicate

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


@pytest.mark.parametrize("schedule", [FAR_AHEAD, KEPT], ids=["far ahead", "kept"])
def test_a_block_called_twice_in_one_forward(ranks, schedule):
    check(ranks, called_twice, schedule=schedule)


def tied_across_units(s: Session) -> None:
    model = make_gpt(depth=3)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    s.start(model)
    s.train(0, 1, 2)
    if not s.reference:
        unit = {row.name: row.unit for row in dmuon.routing_table(model)}
        s.notes.append((unit["blocks.0.up.weight"], unit["blocks.0.down.weight"]))


def test_a_matrix_tied_across_units_belongs_to_their_ancestor(ranks):
    *notes, _ = check(ranks, tied_across_units, schedule=NO_COPY)
    assert notes == [[("", "blocks.0")]] * 4


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


def test_a_matrix_tied_inside_a_unit_stays_tied(ranks):
    *notes, _ = check(ranks, tied_inside_a_unit, schedule=FAR_AHEAD)
    assert notes == [[True]] * 4


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


def test_units_inside_units(ranks):
    check(ranks, nested_units, schedule=AHEAD)


class _Inner(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(24, 24, bias=False) for _ in range(2))
        self.shared = shared

    def forward(self, x: torch.Tensor, inside: bool) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.shared(x) if inside else x)


class _Submodules(nn.Module):
    """A model whose submodules a program calls by themselves. One may call another inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(24, 24, bias=False)
        self.inner = _Inner(self.shared)
        self.tail = nn.Linear(24, 24, bias=False)


def calls_inside_sometimes(s: Session) -> None:
    torch.manual_seed(0)
    model = _Submodules()
    s.start(model, units=None, options={"units": [model.shared, model.inner, model.tail]})

    def loss(step: int, inside: bool) -> LossOf:
        def of(model: nn.Module, rank: int) -> torch.Tensor:
            x = torch.randn(3, 24, generator=torch.Generator().manual_seed(10 * step + rank))
            return model.tail(model.inner(model.shared(x), inside)).square().mean()

        return of

    for step, inside in enumerate([False, False, True, True, False]):
        s.backward(loss(step, inside))
        s.step()


@pytest.mark.parametrize("schedule", [ON_DEMAND, AHEAD])
def test_submodules_that_call_others_inside_sometimes(ranks, schedule):
    check(ranks, calls_inside_sometimes, schedule=schedule)


def trains_after_an_evaluation(s: Session) -> None:
    """Evaluates and trains by submodules, without a call of the model between. A rank has no loss once."""
    torch.manual_seed(0)
    model = _Submodules()
    s.start(model, units=None, options={"units": [model.shared, model.inner, model.tail]})

    def loss(step: int) -> LossOf:
        def of(model: nn.Module, rank: int) -> torch.Tensor | None:
            x = torch.randn(3, 24, generator=torch.Generator().manual_seed(10 * step + rank))
            with torch.no_grad():
                model.tail(model.inner(model.shared(x), False))
            value = model.tail(model.inner(model.shared(x), False)).square().mean()
            return None if (step, rank) == (2, 1) else value

        return of

    for step in range(4):
        s.backward(loss(step))
        s.step()


def test_training_by_submodules_after_an_evaluation_by_submodules(ranks):
    check(ranks, trains_after_an_evaluation, schedule=AHEAD)


def plain_replicas(s: Session) -> None:
    s.start(make_gpt(depth=2), units=None)
    s.train(0, 1, 2)


@pytest.mark.parametrize(("mesh", "schedule"), [((2, 2), KEPT), ((4,), ON_DEMAND)])
def test_plain_replicas(ranks, mesh, schedule):
    check(ranks, plain_replicas, mesh, schedule=schedule)


def only_blocks_sharded(s: Session) -> None:
    """The root stays plain: its AdamW parameters are replicas beside DTensors."""
    model = make_gpt(depth=2)
    if s.reference:
        s.start(model)
    else:
        s.initial = {n: p.detach().clone() for n, p in model.named_parameters()}
        s.model = model
        dedicate(model, s.mesh, s.schedule)
        for block in model.blocks:
            fully_shard(block, mesh=s.mesh)
        s.opt = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    s.train(0, 1, 2)


def test_plain_parameters_beside_sharded_ones(ranks):
    check(ranks, only_blocks_sharded, schedule=KEPT_NO_COPY)


def only_matrices(s: Session, sizes: list[int], fsdp: bool = True) -> None:
    torch.manual_seed(0)
    everything = {"select": lambda *_: True}  # single rows too
    s.start(Matrices(sizes), units=(lambda m: []) if fsdp else None, options=everything)
    for step in range(3):
        s.backward(square_loss(step))
        s.step()


@pytest.mark.parametrize(("fsdp", "schedule"), [(True, NO_COPY), (False, AHEAD)])
@pytest.mark.parametrize("sizes", [[10, 1], [10, 7, 1]])
def test_fewer_matrices_than_ranks_and_nothing_else(ranks, sizes, fsdp, schedule):
    check(ranks, only_matrices, schedule=schedule, sizes=sizes, fsdp=fsdp)


def no_matrices(s: Session) -> None:
    torch.manual_seed(0)
    model = make_gpt(depth=2)
    s.start(model, names=lambda name: False, options=None if s.reference else {"select": lambda *_: False})
    s.train(0, 1)
    s.backward(language_loss(2, s.size))
    s.clip(0.1)
    s.step()


def test_no_matrices(ranks):
    *notes, reference = check(ranks, no_matrices, schedule=ON_DEMAND)
    for note in notes:
        assert note == pytest.approx(reference, rel=1e-5)


def two_models(s: Session) -> None:
    """The second model's weights are the ones compared; the first one's go to the notes."""
    first, second = s.another(), s.another()
    first.start(make_gpt(seed=1, depth=1))
    second.start(make_gpt(seed=2, depth=2))
    for step in range(3):
        first.train(step)
        second.train(step + 1)
    s.notes.append((first.initial, first.weights()))
    s.initial, s.model = second.initial, second.model


def test_two_models_trained_in_turn(ranks):
    *notes, reference = check(ranks, two_models, schedule=FAR_AHEAD)
    for note in notes:
        assert_equal_to_reference(*reference[0], note[0][1])
