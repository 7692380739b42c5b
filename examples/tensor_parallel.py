"""Trains a small Llama under FSDP2 and tensor parallelism, with a checkpoint in the middle.

    torchrun --nproc-per-node 4 examples/tensor_parallel.py           # 2 shards of pairs of ranks
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --tensor 4
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --tensor 1 --resume

Each pair of ranks has slices of the matrices: parallelize_module cuts them. dedicate_params, fully_shard and Muon get
the rest of the mesh. The order is torchtitan's, from the meta device on. With --resume the program goes on from the
checkpoint, on any mesh.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dmuon

NUM_WORDS, LENGTH, WIDTH, NUM_HEADS, NUM_KV_HEADS, NUM_BLOCKS = 64, 16, 64, 8, 4, 3
NUM_STEPS, BATCH_SIZE = 20, 32  # the batch of all ranks
LR, ADAMW_LR, WEIGHT_DECAY, MAX_NORM = 1e-2, 4e-3, 0.1, 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // NUM_HEADS
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq = nn.Linear(WIDTH, NUM_HEADS * head, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, NUM_KV_HEADS * head, bias=False) for _ in range(2))
        self.wo = nn.Linear(NUM_HEADS * head, WIDTH, bias=False)
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [sentences, words, width]. A rank has some of the heads."""
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // NUM_HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = nn.functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        projected: torch.Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return projected

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x))
        y = self.ffn_norm(x)
        x = x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))
        return x


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Turns pairs of channels by angles that grow with the position."""
    length, channels = x.shape[-2:]
    frequencies = 100.0 ** -torch.linspace(0, 1, channels // 2, device=x.device)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, NUM_WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def initialise(model: nn.Module) -> None:
    torch.manual_seed(0)  # all ranks alike
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
        elif isinstance(module, nn.RMSNorm):
            module.reset_parameters()


def make_model() -> Llama:
    model = Llama()
    initialise(model)
    return model


def parallelize(model: Llama, mesh: DeviceMesh) -> None:
    """Cuts matrices over the ranks of `mesh`, and between layers the activations, along the sentence."""
    top: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, top)
    styles: dict[str, ParallelStyle] = {}
    styles |= {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("wq", "wk", "wv", "w1", "w3")}
    styles |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("wo", "w2")}
    styles |= {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
    for block in model.blocks:
        parallelize_module(block, mesh, styles)


def sentences(step: int, part: int = 0, num_parts: int = 1) -> torch.Tensor:
    """Sentences that count on from a random number: a part of the batch of a step."""
    first = torch.randint(0, NUM_WORDS, (BATCH_SIZE, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(LENGTH + 1))[part::num_parts] % NUM_WORDS


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share a matrix")
    parser.add_argument("--checkpoint", type=Path, default=Path("out/tensor_parallel"), help="folder")
    parser.add_argument("--resume", action="store_true", help="begin with the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("out/tensor_parallel.pt"), help="file for the whole weights")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    num_parts = torch.distributed.get_world_size() // arguments.tensor
    mesh = init_device_mesh(device, (num_parts, arguments.tensor), mesh_dim_names=("data", "tensor"))
    is_first = torch.distributed.get_rank() == 0

    with torch.device("meta"):
        model = Llama()
    parallelize(model, mesh["tensor"])
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    dmuon.dedicate_params(model, mesh["data"])  # 1. after parallelize_module
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh["data"])
    model.to_empty(device=device)
    initialise(model)
    optimizer = dmuon.Muon(model, lr=LR, adamw_lr=ADAMW_LR, weight_decay=WEIGHT_DECAY)  # 2. after fully_shard
    if is_first:
        print(dmuon.routing_table(model))

    first = NUM_STEPS // 2 if arguments.resume else 0
    if arguments.resume:
        weights, state = dsd.get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=arguments.checkpoint)
        dsd.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for step in range(first, NUM_STEPS):
        loss = loss_of(model, sentences(step, mesh["data"].get_local_rank(), num_parts).to(device))
        loss.backward()
        dmuon.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if is_first:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
        if step + 1 == NUM_STEPS // 2:
            weights, state = dsd.get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=arguments.checkpoint)

    weights = dsd.get_model_state_dict(model, options=dsd.StateDictOptions(full_state_dict=True, cpu_offload=True))
    if is_first:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, arguments.out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
