"""Ranks that begin with different weights are told so, or begin with the first rank's where that is asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import make_gpt
from refusals import REFUSED, Refusals, expect_refusal, rank_of
from scenario import Session, check
from training import AHEAD, NO_COPY, ON_DEMAND, dedicate, shard

import dmuon

refused = Refusals()


def start(mesh: Any, model: nn.Module, fsdp: bool, **options: Any) -> dmuon.Muon:
    dedicate(model, mesh, AHEAD, **options)
    if fsdp:
        shard(model, mesh)
    return dmuon.Muon(model)


def flip_a_bit(parameter: torch.Tensor) -> None:
    parameter.detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


WAY_OUT = ("Expected: the same values on every rank", "sync_from_rank0=True")


@refused("8 of 8 parameters", "'blocks.0.qkv.weight' (on ranks 1, 2, 3)", ", more. Expected", *WAY_OUT, fsdp=True)
@refused("17 of 18 parameters", "(on ranks 1, 2, 3)", *WAY_OUT, fsdp=False)  # a norm's weight is ones on every rank
def the_first_rank_alone_has_loaded(mesh: Any, fsdp: bool) -> None:
    model = make_gpt(seed=rank_of(mesh), depth=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "norm.weight":
                parameter.add_(rank_of(mesh))
    start(mesh, model, fsdp)


@refused("1 of 4 parameters", "'blocks.0.up.weight' (on ranks 2). Expected", *WAY_OUT, value=None)
@refused("1 of 4 parameters", "'blocks.0.up.weight' (on ranks 2). Expected", *WAY_OUT, value=math.nan)
def one_bit_differs(mesh: Any, value: float | None) -> None:
    model = make_gpt(depth=1)
    weight = model.blocks[0].up.weight
    if value is not None:
        weight.detach().fill_(value)
    if rank_of(mesh) == 2:
        flip_a_bit(weight)
    start(mesh, model, fsdp=True)


@refused("1 of 11 parameters", "'blocks.0.up.bias' (on ranks 3)", *WAY_OUT)
def what_adamw_updates_on_every_rank_differs(mesh: Any) -> None:
    model = make_gpt(depth=1)
    if rank_of(mesh) == 3:
        flip_a_bit(model.blocks[0].up.bias)
    start(mesh, model, fsdp=False)


@refused("ranks differ", "sync_from_rank0=False", "rank 1 has: ", "sync_from_rank0=True")
def one_rank_alone_asks_for_the_first(mesh: Any) -> None:
    start(mesh, make_gpt(depth=1), fsdp=True, sync_from_rank0=rank_of(mesh) == 1)


@refused("dedicate_params: sync_from_rank0: expected True or False, got 1")
def no_bool(mesh: Any) -> None:
    start(mesh, make_gpt(depth=1), fsdp=True, sync_from_rank0=1)


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


def nans_on_all_ranks(mesh: Any) -> bool:
    model = make_gpt(depth=1)
    model.blocks[0].up.weight.detach().fill_(math.nan)
    start(mesh, model, fsdp=True)
    return True


def test_equal_bits_are_equal_whatever_they_mean(ranks):
    assert ranks.run(nans_on_all_ranks, (2, 2)) == [True] * 4


def from_the_first_rank(s: Session, fsdp: bool) -> None:
    """Other ranks begin with other weights, but for what fully_shard manages; some of it is frozen."""

    def disturb(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            is_matrix = "blocks" in name and parameter.ndim == 2
            if s.rank and (is_matrix or not fsdp):
                parameter.detach().add_(s.rank)
        model.norm.requires_grad_(fsdp)

    units = {} if fsdp else {"units": None}
    s.start(make_gpt(depth=2), prepare=disturb, options={"sync_from_rank0": True}, **units)
    s.train(0, 1, 2)


@pytest.mark.parametrize(
    ("mesh", "schedule", "fsdp"),
    [((4,), AHEAD, True), ((4,), AHEAD, False), ((2, 2), NO_COPY, True), ((2, 2), ON_DEMAND, False)],
)
def test_training_goes_on_from_the_first_rank_s_values(ranks, mesh, schedule, fsdp):
    check(ranks, from_the_first_rank, mesh, schedule=schedule, fsdp=fsdp)
