"""Trains a small network with dmuon, on one process, under FSDP2 or under HSDP.

python examples/train.py
torchrun --nproc-per-node 4 examples/train.py              # FSDP2: 4 shards
torchrun --nproc-per-node 4 examples/train.py --nodes 2    # HSDP: 2 replicas of 2 shards
"""

import argparse
import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return x


parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=1)
nodes = parser.parse_args().nodes

device = "cuda" if torch.cuda.is_available() else "cpu"
rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 0))
mesh = None  # one process, no process group
if num_ranks and nodes > 1:
    mesh = init_device_mesh(device, (nodes, num_ranks // nodes), mesh_dim_names=("replicate", "shard"))
elif num_ranks:
    mesh = init_device_mesh(device, (num_ranks,))

torch.manual_seed(0)  # the same weights on every rank
blocks = [Block(64) for _ in range(4)]
model = nn.Sequential(nn.Embedding(1000, 64), *blocks, nn.Linear(64, 1000)).to(device)

dmuon.dedicate_params(model, mesh)  # 1. before fully_shard, with the same mesh
for module in [*blocks, model] if mesh is not None else []:
    fully_shard(module, mesh=mesh)
optimizer = dmuon.Muon(model, lr=2e-2, weight_decay=0.1)  # 2. after fully_shard

if rank == 0:
    print(dmuon.routing_table(model))
torch.manual_seed(1 + rank)  # different data on every rank
for step in range(20):
    tokens = torch.randint(0, 1000, (256,), device=device)
    loss = nn.functional.cross_entropy(model(tokens), tokens)
    loss.backward()
    dmuon.clip_grad_norm_(model, 1.0)  # 3. instead of torch.nn.utils.clip_grad_norm_
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}")
if mesh is not None:
    torch.distributed.destroy_process_group()
