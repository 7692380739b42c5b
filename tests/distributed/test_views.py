"""Matrices that share a parameter are orthogonalised each by itself, as if it were a parameter of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from cut import trained_alone
from mixture import make_mixture, matrices_of, select
from models import weights_of_plain
from scenario import assert_equal_to_reference
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import AHEAD, LR, ON_DEMAND, WEIGHT_DECAY, dedicate, place_of, shard, weights_of

import dmuon

STEPS = 4
MOST = 0.5  # of the gradients' norm: less than any here, so that each step is clipped


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """Of this rank's part of 12 rows."""
    x = torch.randn(12, 12, generator=torch.Generator().manual_seed(step))
    return model(x.chunk(size)[rank]).square().mean()


@pytest.fixture(scope="module")
def reference() -> list[dict[str, torch.Tensor]]:
    return trained_alone(make_mixture(), matrices_of, loss_of, STEPS, MOST)


def train(mesh: Any, schedule: dict[str, Any], fsdp: bool, held: bool, strategy: str) -> dict[str, Any]:
    """Also saves and loads everything, in the middle, and says what the table and `verify` say."""
    model = make_mixture()
    dedicate(model, mesh, schedule, select=select, strategy=strategy)
    if fsdp:
        shard(model, mesh)
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    rank, size = place_of(mesh)
    for step in range(STEPS):
        if held:
            with dmuon.no_sync(model):
                (loss_of(model, step, rank, size) / 2).backward()
            (loss_of(model, step, rank, size) / 2).backward()
        else:
            loss_of(model, step, rank, size).backward()
        dmuon.clip_grad_norm_(model, MOST)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            saved = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
            loss_of(model, 100, rank, size).backward()
            optimizer.step()  # which what was saved undoes
            optimizer.zero_grad()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    verification = dmuon.verify(model, optimizer)
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    owners = {row.name: row.owner for row in dmuon.routing_table(model) if row.algorithm == "muon"}
    return {"weights": weights_of(model), "saved": whole, "ok": verification.ok, "owners": owners}


@pytest.mark.parametrize(
    ("mesh", "schedule", "fsdp", "held", "strategy"),
    [
        ((1, 4), AHEAD, True, False, "round_robin"),
        ((2, 2), AHEAD, True, True, "round_robin"),
        ((2, 2), AHEAD, True, False, "load_balance"),
        ((2, 2), {**AHEAD, "node_copy": False}, True, False, "round_robin"),
        ((4, 1), ON_DEMAND, True, False, "round_robin"),
        ((3,), AHEAD, False, False, "load_balance"),
        ((1,), AHEAD, False, False, "load_balance"),
    ],
)
def test_each_matrix_is_trained_as_on_one_process(ranks, reference, mesh, schedule, fsdp, held, strategy):
    for got in ranks.run(train, mesh, schedule=schedule, fsdp=fsdp, held=held, strategy=strategy):
        assert_equal_to_reference(*reference, got["weights"])
        for name, weight in got["weights"].items():
            assert torch.equal(got["saved"][name], weight), name
        assert got["ok"]
        if strategy == "round_robin":
            assert sorted(got["owners"]["blocks.0.experts.gate_up"]) == [0, 1, 2, 3]
            # Blocks of columns, stored as [in, out]: an owner has those of whole experts.
            assert len(got["owners"]["blocks.0.stored.gate_up"]) == 3


def updated_in_bf16(mesh: Any) -> dict[str, torch.Tensor]:
    """The change of every weight in one step of bf16 weights and iteration."""
    model = make_mixture()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dedicate(model, mesh, AHEAD, select=select, mp_policy=policy)
    shard(model, mesh, mp_policy=policy)
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=0.0, ns_dtype=torch.bfloat16)
    before = weights_of(model)
    loss_of(model, 0, *place_of(mesh)).backward()
    optimizer.step()
    return {name: weight - before[name] for name, weight in weights_of(model).items()}


@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)])
def test_in_bf16_every_matrix_is_nearly_orthogonal_by_itself(ranks, mesh):
    for changes in ranks.run(updated_in_bf16, mesh):
        for name, change in changes.items():
            if not (matrices := matrices_of(name)):
                continue
            for matrix in matrices(change.float()):
                # The iteration leaves the singular values of a matrix of full rank near 1; lr * sqrt(max(1, m / n)).
                factor = LR * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                assert 0.5 < float(torch.linalg.svdvals(matrix)[0]) / factor < 1.3, name


def written_back_and_averaged(mesh: Any) -> dict[str, Any]:
    """What a change inside full_params and a mean do to parameters that have several owners."""
    model = make_mixture()
    dedicate(model, mesh, AHEAD, select=select, strategy="round_robin")
    shard(model, mesh)
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    assert len(next(row.owner for row in dmuon.routing_table(model) if row.name.endswith("0.experts.gate_up"))) == 4
    ema = dmuon.Ema(model, decay=0.75)
    with dmuon.full_params(model, writeback=True), torch.no_grad():
        model.blocks[0].experts.gate_up[1, 3] = 7.0
        model.blocks[1].qkv.weight[13] = 5.0
    changed = weights_of(model)
    ema.update()
    with ema.applied():
        averaged = weights_of(model)
    loss_of(model, 0, *place_of(mesh)).backward()
    stack = dict(model.named_parameters())["blocks.0.experts.gate_up"].grad
    norm = float(torch.linalg.vector_norm(stack))
    stack.mul_(2)
    twice = float(torch.linalg.vector_norm(stack))
    total = float(dmuon.clip_grad_norm_(model, 1e9))
    optimizer.zero_grad()
    saved = ema.state_dict()["weights"]["blocks.0.experts.gate_up"]
    mean = saved.full_tensor() if hasattr(saved, "full_tensor") else saved
    return {"changed": changed, "averaged": averaged, "mean": mean, "norms": (norm, twice, total)}


@pytest.mark.parametrize("mesh", [(1, 4), (2, 2), (4, 1)])
def test_a_parameter_of_several_owners_is_changed_averaged_and_measured_as_one(ranks, mesh):
    model = make_mixture()
    before = weights_of_plain(model)
    expected = {name: weight.clone() for name, weight in before.items()}
    expected["blocks.0.experts.gate_up"][1, 3] = 7.0
    expected["blocks.1.qkv.weight"][13] = 5.0
    model.load_state_dict(expected)
    loss_of(model, 0, 0, 1).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    stack = gradients["blocks.0.experts.gate_up"]
    norm = float(stack.norm())
    stack.mul_(2)
    total = float(torch.nn.utils.get_total_norm(list(gradients.values())))
    for got in ranks.run(written_back_and_averaged, mesh):
        for name, weight in expected.items():
            mean = 0.75 * before[name] + 0.25 * weight
            assert torch.equal(got["changed"][name], weight), name
            torch.testing.assert_close(got["averaged"][name], mean, msg=name)
        torch.testing.assert_close(got["mean"], got["averaged"]["blocks.0.experts.gate_up"])
        assert got["norms"] == pytest.approx((norm, 2 * norm, total), rel=1e-5)


def from_rank_0(mesh: Any) -> dict[str, torch.Tensor]:
    model = make_mixture()
    if mesh.get_rank():
        with torch.no_grad():
            model.blocks[0].experts.gate_up += mesh.get_rank()
    dedicate(model, mesh, AHEAD, select=select, strategy="round_robin", sync_from_rank0=True)
    shard(model, mesh)
    dmuon.Muon(model)
    return weights_of(model)


@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)])
def test_all_owners_of_a_parameter_take_rank_0s_values(ranks, mesh):
    expected = weights_of_plain(make_mixture())["blocks.0.experts.gate_up"]
    for got in ranks.run(from_rank_0, mesh):
        assert torch.equal(got["blocks.0.experts.gate_up"], expected)
