"""Under tensor parallelism the command plans what the ranks do, and they take its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from dmuon._command.main import main
from pool import TEST_DEVICE
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from tp_models import Llama, loss_of, make_model, meshes, parallelize, tokens
from training import dedicate

import dmuon


def replicated(device_type: str, dims: tuple[int, ...]) -> Llama:
    """Has matrices that are cut, one that is plain and one that is a DTensor without a cut."""
    model, (_, tensor) = make_model(gate=True), meshes(dims, device_type)
    parallelize(model, tensor, sequence=False)
    gate = model.blocks[1].gate
    gate.weight = nn.Parameter(distribute_tensor(gate.weight.detach(), tensor, [Replicate()]))
    gate.forward = lambda x: x @ gate.weight.to_local().t()
    return model


def inventory(mesh: DeviceMesh, dims: tuple[int, ...]) -> str:
    return json.dumps(dmuon.inventory(replicated(mesh.device_type, dims)))


class Divided(nn.Module):
    """Lists a DTensor first that the data-parallel mesh does not divide."""

    def __init__(self, data: DeviceMesh, tensor: DeviceMesh) -> None:
        super().__init__()
        for name, mesh, placement in (("copied", data, Replicate()), ("cut", tensor, Shard(0))):
            weights = distribute_tensor(torch.randn(8, 6, device=mesh.device_type), mesh, [placement])
            self.register_module(name, nn.Linear(6, 8, bias=False))
            self.get_submodule(name).weight = nn.Parameter(weights)


def marked(mesh: DeviceMesh) -> dict[str, bool]:
    units = dmuon.inventory(Divided(*meshes((2, 2), mesh.device_type)))["units"]
    return {unit["name"]: one.get("whole", False) for unit in units for one in unit["matrices"]}


def planned(mesh: DeviceMesh, dims: tuple[int, ...], **options: Any) -> tuple[str, float]:
    """The plan of a model that has taken a step by it, and how far a replicated matrix has moved."""
    data, _ = meshes(dims, mesh.device_type)
    model = replicated(mesh.device_type, dims)
    dedicate(model, data, options)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=data)
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
    name = "blocks.1.gate.weight"
    before = model.state_dict()[name].full_tensor()
    loss_of(model, tokens(0, data.get_local_rank())).backward()
    optimizer.step()
    return optimizer.plan.to_json(), float((model.state_dict()[name].full_tensor() - before).norm())


@pytest.mark.parametrize("strategy", ["load_balance", "round_robin"])
def test_the_command_plans_what_the_ranks_do(ranks, tmp_path: Path, strategy: str):
    dims = (2, 2)
    (tmp_path / "model.json").write_text(ranks.run(inventory, (4,), dims=dims)[0])
    file = str(tmp_path / "plan.json")
    task = ["--inventory", f"{tmp_path}/model.json", "--mesh", "4", "--tp", "2", "--device", "cpu"]
    assert main(["plan", *task, "--strategy", strategy, "--save", file]) == 0
    command = json.loads(Path(file).read_text())
    cut = {one["name"]: one["tensor_parallel"] for one in command["assignments"]}
    assert {name for name, is_cut in cut.items() if not is_cut} == {"blocks.0.gate.weight", "blocks.1.gate.weight"}
    loaded = ranks.run(planned, (4,), dims=dims, plan=file)
    assert all(json.loads(text) == command and moved > 0 for text, moved in loaded)
    if TEST_DEVICE == "cpu":  # whose costs the command was given
        made = json.loads(ranks.run(planned, (4,), dims=dims, strategy=strategy)[0][0])
        for member in ("assignments", "batches", "costs", "loads_ms", "certificate"):
            assert made[member] == command[member], member


def test_a_mesh_that_divides_nothing_is_not_taken_for_the_one_that_does(ranks):
    assert ranks.run(marked, (4,)) == [{"copied": True, "cut": False}] * 4
