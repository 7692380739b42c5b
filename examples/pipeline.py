"""Trains a residual network in two pipeline stages, each sharded over the other ranks, by the 1F1B schedule.

    torchrun --nproc-per-node 4 examples/pipeline.py

dmuon treats each stage as a model of its own, on the ranks that run it: dedicate_params, fully_shard and Muon use that
part of the mesh. The schedule divides gradients by the number of micro-batches; dmuon does that at the owners. Only
clipping spans all stages.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import dmuon

NUM_STAGES, NUM_BLOCKS, WIDTH = 2, 4, 32
NUM_STEPS, BATCH_SIZE, MICRO_BATCHES = 20, 16, 4  # the batch of a rank
LR, ADAMW_LR, WEIGHT_DECAY, MAX_NORM = 5e-3, 2e-3, 0.1, 0.2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, self.down(torch.relu(self.up(x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors, and what to make of them: themselves, turned by one place."""
    x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x.roll(1, dims=1)


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/pipeline"), help="folder for the weights of each stage")
    out = parser.parse_args().out

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (NUM_STAGES, dist.get_world_size() // NUM_STAGES), mesh_dim_names=("pp", "dp"))
    index, rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")

    length = NUM_BLOCKS // NUM_STAGES
    model = make_model()[index * length : (index + 1) * length].to(device)
    dmuon.dedicate_params(model, mesh["dp"])
    for module in [*model.children(), model]:
        fully_shard(module, mesh=mesh["dp"])
    optimizer = dmuon.Muon(model, lr=LR, adamw_lr=ADAMW_LR, weight_decay=WEIGHT_DECAY)

    stage = PipelineStage(model, index, NUM_STAGES, device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=mean_square)
    for step in range(NUM_STEPS):
        x, target = (values.to(device) for values in batch(step, rank))
        losses: list[torch.Tensor] = []
        if stage.is_first:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)
        dmuon.clip_grad_norm_(model, MAX_NORM, pp_mesh=mesh["pp"])
        optimizer.step()
        optimizer.zero_grad()
        if losses and rank == 0:
            print(f"step {step + 1}: loss {torch.stack(losses).mean().item():.3f}", flush=True)

    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        torch.save({name: value.cpu() for name, value in weights.items()}, out / f"stage_{index}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
