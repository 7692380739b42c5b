"""A small model trained on one device or on the ranks of a mesh; its weights must be the same wherever it trains.

As a program it is one rank of several: `gpu_training.py WEIGHTS R G`, with torchrun's environment variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from gpu_device import open_device
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

WIDTH, NUM_BLOCKS, BATCH, STEPS = 48, 3, 8, 5
TRACED = 2  # steps after which nothing is done for the first time

Weights = dict[str, torch.Tensor]
Guard = Callable[[], AbstractContextManager[None]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def train(where: torch.device, mesh: DeviceMesh | None = None, guard: Guard = nullcontext) -> tuple[Weights, Weights]:
    """Weights on the CPU, before and after. `guard` is around every forward, backward and step but the first ones."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = torch.randn(STEPS, BATCH, WIDTH)
    model.to(where)
    if mesh is not None:
        data = data.chunk(mesh.size(), dim=1)[dist.get_rank()]
    data = data.to(where)
    dmuon.dedicate_params(model, mesh, costs="modelled")
    if mesh is not None:
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=1e-2, ns_dtype=torch.float32)
    for step in range(STEPS):
        around = guard if step >= TRACED else nullcontext
        with around():
            loss = (model(data[step]) - data[step].roll(1, -1)).square().mean()
        with around():
            loss.backward()
        with around():
            dmuon.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return before, {name: whole(value).cpu() for name, value in model.state_dict().items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value


def furthest(found: Weights, expected: Weights, before: Weights) -> float:
    """The largest difference of a parameter, as a part of the way that it has gone."""
    return max(
        ((found[name] - expected[name]).norm() / (expected[name] - before[name]).norm()).item() for name in expected
    )


def run_rank(train_on: Callable[[torch.device, DeviceMesh], tuple[Weights, Weights]]) -> None:
    """One rank, of the program's arguments; the first one writes the weights."""
    device, weights, shape = open_device(), Path(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3]))
    rank = int(os.environ["RANK"])
    where = device.use(rank)
    dist.init_process_group(device.backends)
    one = torch.ones(1, device=where)
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size(), one
    mesh = init_device_mesh(device.kind, shape, mesh_dim_names=("replicate", "shard"))
    _, after = train_on(where, mesh)
    if rank == 0:
        torch.save(after, weights)
    device.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(train)
