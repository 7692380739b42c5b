"""Meshes whose ranks do not ascend, and meshes with a flattened dimension."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import make_gpt
from scenario import Session, assert_equal_to_reference, run_scenario
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from training import AHEAD, NO_COPY, weights_of

import dmuon

ORDERS = ([1, 0, 3, 2], [3, 2, 1, 0], [[0, 2], [1, 3]], [[2, 3], [0, 1]], [[3, 1], [2, 0]], [[0, 3], [1, 2]])


def mesh_of(mesh: Any, table: Any) -> DeviceMesh:
    names = ("replicate", "shard") if isinstance(table[0], list) else ("shard",)
    return DeviceMesh(mesh.device_type, torch.tensor(table), mesh_dim_names=names)


class Equal(nn.Module):
    """Units of eight equal matrices, whose owners have equal parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8))) for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(x + block(x))
        return self.head(x)


def of_equal_parts(s: Session) -> None:
    s.start(Equal(), units=None)

    def loss(step: int) -> Any:
        def of(model: nn.Module, rank: int) -> torch.Tensor:
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            return model(x.to(next(model.parameters()).device)).square().mean()

        return of

    for step in range(3):
        s.backward(loss(step))
        s.step()


def trained(s: Session) -> None:
    s.start(make_gpt())
    s.train(0, 1)
    if not s.reference:  # goes back to a checkpoint
        saved = {name: value.clone() for name, value in s.model.state_dict().items()}
        state = copy.deepcopy(s.opt.state_dict())
        s.train(2)
        s.model.load_state_dict(saved)
        s.opt.load_state_dict(state)
    s.train(3)


def on_ranks(mesh: Any, table: Any, schedule: dict[str, Any], scenario: Any = trained) -> Any:
    return run_scenario(mesh_of(mesh, table), scenario, schedule)


@pytest.mark.parametrize("schedule", [AHEAD, NO_COPY], ids=["copies", "no copies"])
@pytest.mark.parametrize("table", ORDERS, ids=str)
def test_trains_as_one_process(ranks, table, schedule):
    initial, expected, _ = run_scenario(None, trained, schedule, 4)
    for _, got, _ in ranks.run(on_ranks, (2, 2), table=table, schedule=schedule):
        assert_equal_to_reference(initial, expected, got)


def on_a_flattened_mesh(mesh: Any, sizes: Any, schedule: dict[str, Any]) -> Any:
    """As for context parallelism: the ranks that share a sequence are ranks of the shard dimension too."""
    device_mesh = init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("replicate", "data", "context"))
    joint = device_mesh["data", "context"]._flatten("shard")
    return run_scenario(joint if sizes[0] == 1 else device_mesh["replicate", "shard"], trained, schedule)


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (2, 2, 1)], ids=str)
def test_trains_as_one_process_on_a_flattened_mesh(ranks, sizes):
    initial, expected, _ = run_scenario(None, trained, AHEAD, 4)
    for _, got, _ in ranks.run(on_a_flattened_mesh, (2, 2), sizes=sizes, schedule=AHEAD):
        assert_equal_to_reference(initial, expected, got)


@pytest.mark.parametrize("table", ORDERS, ids=str)
def test_units_whose_parts_are_equal_too(ranks, table):
    initial, expected, _ = run_scenario(None, of_equal_parts, AHEAD, 4)
    for _, got, _ in ranks.run(on_ranks, (2, 2), table=table, schedule=AHEAD, scenario=of_equal_parts):
        assert_equal_to_reference(initial, expected, got)


def shards_beside_stock(mesh: Any, table: Any) -> tuple[dict[str, bool], dict[str, bool]]:
    """Returns by name whether a shard is that of stock FSDP2, and whether its `full_tensor` is the weight."""
    mesh = mesh_of(mesh, table)
    stock = make_gpt()
    for module in (*stock.blocks, stock):
        fully_shard(module, mesh=mesh)
    model = make_gpt()
    dmuon.dedicate_params(model, mesh, costs="modelled", sync_from_rank0=True)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    dmuon.Muon(model)
    whole, theirs = weights_of(model), stock.state_dict()
    ours: dict[str, Any] = model.state_dict()
    return (
        {name: torch.equal(value.to_local(), theirs[name].to_local()) for name, value in ours.items()},
        {name: torch.equal(value.full_tensor(), whole[name]) for name, value in ours.items()},
    )


@pytest.mark.parametrize("table", ORDERS, ids=str)
def test_shards_of_a_state_dict_are_those_of_fsdp2(ranks, table):
    for are_shards_alike, are_weights in ranks.run(shards_beside_stock, (2, 2), table=table):
        assert len(are_shards_alike) > 5
        assert all(are_shards_alike.values()) and all(are_weights.values())


def refused(mesh: Any, table: Any) -> str:
    try:
        dmuon.dedicate_params(nn.Linear(4, 4), mesh_of(mesh, table))
    except ValueError as error:
        return str(error)
    return ""


def test_rows_in_which_fsdp2_would_mix_shards_are_refused(ranks):
    for message in ranks.run(refused, (2, 2), table=[[0, 1], [3, 2]]):
        assert "dedicate_params: mesh: expected rows whose ranks ascend in the same columns" in message
        assert "got ((0, 1), (3, 2))" in message


def loaded_from_replicas(mesh: DeviceMesh, order: Any) -> list[str]:
    """Names of matrices that a load of DTensors, which every rank has whole, makes other ones."""
    model = make_gpt()
    ordered = mesh_of(mesh, order)
    dmuon.dedicate_params(model, ordered, costs="modelled")
    dmuon.Muon(model)
    whole = {name: 2 * weight for name, weight in weights_of(model).items()}
    given = model.state_dict()
    matrices = [name for name, value in given.items() if isinstance(value, DTensor)]
    assert len(matrices) > 5
    for name in matrices:
        value = whole[name].to(given[name].device)
        given[name] = DTensor.from_local(value, ordered, [Replicate()] * ordered.ndim, run_check=False)
    model.load_state_dict(given)
    loaded = weights_of(model)
    return [name for name in matrices if not torch.equal(loaded[name], whole[name])]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_replicated_dtensors_load_as_they_are(ranks, order):
    assert ranks.run(loaded_from_replicas, (4,), order=order) == [[]] * 4


def written_back(mesh: DeviceMesh, order: Any) -> bool:
    """What full_params has shown and writes back is what was there."""
    model = make_gpt()
    ordered = mesh_of(mesh, order)
    dmuon.dedicate_params(model, ordered, costs="modelled")
    for block in model.blocks:
        fully_shard(block, mesh=ordered)
    fully_shard(model, mesh=ordered)
    dmuon.Muon(model)
    before = weights_of(model)
    with dmuon.full_params(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return all(torch.equal(weight, 2 * before[name]) for name, weight in weights_of(model).items())


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_full_params_write_every_shard_to_its_rank(ranks, order):
    assert all(ranks.run(written_back, (4,), order=order))
