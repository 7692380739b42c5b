"""Starts a model as torchtitan does: on the meta device, so that no rank ever holds it whole.

    torchrun --nproc-per-node 4 examples/torchtitan_order.py

dedicate_params and fully_shard see shapes alone. Then to_empty gives each rank memory for its part, init_weights fills
it with the values that one process would draw, and Muon follows. A checkpoint, if there is one, is loaded last. Started
again, the program trains on from its last checkpoint.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

VOCABULARY, LENGTH, BATCH_SIZE, NUM_STEPS = 64, 17, 8, 20  # the batch of a rank
LR, ADAMW_LR, WEIGHT_DECAY, MAX_NORM = 5e-3, 2e-3, 0.1, 1.0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return x


class Transformer(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits

    def init_weights(self) -> None:
        """Fills every parameter (and buffer, if it had one): after to_empty their memory holds anything."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding | nn.RMSNorm):
                module.reset_parameters()


def sentences(step: int, rank: int, num_ranks: int) -> torch.Tensor:
    """[BATCH_SIZE, LENGTH] tokens: sentences that count on from a random number."""
    generator = torch.Generator().manual_seed(step * num_ranks + rank)
    first = torch.randint(0, VOCABULARY, (BATCH_SIZE, 1), generator=generator)
    return (first + torch.arange(LENGTH)) % VOCABULARY


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/torchtitan_order.pt"), help="file for the whole weights")
    parser.add_argument("--folder", type=Path, default=Path("out/torchtitan_order"), help="for checkpoints")
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(device, (num_ranks,))
    with torch.device("meta"):
        model = Transformer()
    dmuon.dedicate_params(model, mesh)
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh)
    model.to_empty(device=device)
    torch.manual_seed(0)  # on all ranks alike
    model.init_weights()
    optimizer = dmuon.Muon(model, lr=LR, adamw_lr=ADAMW_LR, weight_decay=WEIGHT_DECAY)

    # .metadata is written last: if it exists, the save came to its end.
    first = max((int(path.parent.name[5:]) for path in arguments.folder.glob("step-*/.metadata")), default=0)
    if first > 0:
        weights, state = dsd.get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=arguments.folder / f"step-{first}")
        dsd.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)

    for step in range(first, first + NUM_STEPS):
        loss = loss_of(model, sentences(step, rank, num_ranks).to(device))
        loss.backward()
        dmuon.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    weights, state = dsd.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=arguments.folder / f"step-{first + NUM_STEPS}")
    weights = dsd.get_model_state_dict(model, options=dsd.StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, arguments.out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
