"""Norms for logs are those of whole matrices on one process, and equal on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mixture import make_mixture, select
from models import make_gpt, part
from scenario import Session, blocks_of, check, language_loss
from torch.distributed.fsdp import fully_shard
from training import AHEAD, KEPT, LR, NO_COPY, ON_DEMAND, dedicate, place_of, shard, weights_of

import dmuon


def numbers(norms: dict[str, torch.Tensor]) -> dict[str, float]:
    assert all(norm.shape == () and norm.dtype == torch.float32 for norm in norms.values())
    return {name: float(norm) for name, norm in norms.items()}


def plain_norms(model: Any, gradients: bool) -> dict[str, float]:
    """Of the matrices of blocks."""
    named = {name: p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name}
    return {name: float((p.grad if gradients else p.detach()).norm()) for name, p in named.items()}


def logged(s: Session, sharded: str) -> None:
    def shard_blocks(model: Any) -> None:
        for block in model.blocks if sharded == "blocks" and not s.reference else ():
            fully_shard(block, mesh=s.mesh)

    s.start(make_gpt(depth=2), blocks_of if sharded == "all" else None, prepare=shard_blocks)
    for step in range(3):
        s.backward(language_loss(step, s.size), scale=0.5)
        s.backward(language_loss(step + 5, s.size), scale=0.5)
        s.notes.append(plain_norms(s.model, True) if s.reference else numbers(dmuon.grad_norms(s.model)))
        s.clip(0.1)
        s.notes.append(plain_norms(s.model, True) if s.reference else numbers(dmuon.grad_norms(s.model)))
        s.step()
        s.notes.append(plain_norms(s.model, False) if s.reference else numbers(dmuon.weight_norms(s.model)))


@pytest.mark.parametrize(
    ("mesh", "schedule", "sharded"),
    [
        ((2, 2), AHEAD, "all"),
        ((4,), KEPT, "all"),
        ((4,), AHEAD, "blocks"),
        ((3,), NO_COPY, "nothing"),
        ((1,), ON_DEMAND, "nothing"),
    ],
)
def test_norms_are_those_of_one_process(ranks, mesh, schedule, sharded):
    *notes, expected = check(ranks, logged, mesh, schedule=schedule, sharded=sharded)
    for note in notes:
        assert note == notes[0]  # every bit
        for got, norms in zip(note, expected, strict=True):
            assert got == pytest.approx(norms, rel=1e-4)


def test_norms_after_a_clip_that_has_raised_and_after_zero_grad_are_of_the_present_gradients():
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    language_loss(0, 1)(model, 0).backward()
    assert all(norm > 0 for norm in numbers(dmuon.grad_norms(model)).values())
    opt.step()
    opt.zero_grad()
    (language_loss(1, 1)(model, 0) * math.inf).backward()
    with pytest.raises(RuntimeError, match="expected a finite norm"):
        dmuon.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert set(numbers(dmuon.grad_norms(model)).values()) == {math.inf}
    opt.zero_grad()
    assert set(numbers(dmuon.grad_norms(model)).values()) == {0.0}


def of_divided_stacks(mesh: Any) -> list[Any]:
    """In parts, which have several owners; the experts of a block have no gradient."""
    model = make_mixture()
    dedicate(model, mesh, AHEAD, select=select, strategy="round_robin")
    shard(model, mesh)
    optimizer = dmuon.Muon(model, lr=LR, ns_dtype=torch.float32)
    rank, size = place_of(mesh)
    x = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    before = numbers(dmuon.grad_norms(model))
    model(part(x, rank, size)).square().mean().backward()
    sent = optimizer.stats()
    gradients = numbers(dmuon.grad_norms(model))
    again = numbers(dmuon.grad_norms(model))
    weights = numbers(dmuon.weight_norms(model))
    whole = {name: float(weight.norm()) for name, weight in weights_of(model).items() if name in weights}
    owners = {row.name: row.owner for row in dmuon.routing_table(model) if row.algorithm == "muon"}
    return [before, gradients, again, weights, whole, owners, sent]


def test_norms_of_stacks_in_parts_are_of_the_whole_parameter(ranks):
    model = make_mixture()
    x = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    model(x).square().mean().backward()
    expected = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    for before, gradients, again, weights, whole, owners, _ in ranks.run(of_divided_stacks, (2, 2)):
        assert sorted(owners["blocks.0.experts.gate_up"]) == [0, 1, 2, 3]
        assert set(before.values()) == {0.0}
        assert gradients == again and gradients.keys() == weights.keys() == owners.keys()
        assert gradients == pytest.approx({name: expected[name] for name in owners}, rel=1e-4)
        assert weights == pytest.approx(whole, rel=1e-6)
