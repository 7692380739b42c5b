"""A model with what users add to a training, trained on one device or on ranks; its weights must be the same anywhere.

As a program it is one rank of several: `gpu_features.py WEIGHTS R G`, with torchrun's environment variables. One node
(R = 1) is under fully_shard; else the ranks are plain replicas, in place of DistributedDataParallel.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from gpu_training import Weights, run_rank, whole
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dmuon

WORDS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 4096, 64, 4, 12, 8, 5


class Attention(nn.Module):
    """Queries have a bias, which QK-clip scales. A bias of keys would have no gradient but noise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q, k, v = (of(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        logits = q @ k.mT * 0.25
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(1)
        out = nn.functional.softmax(logits.masked_fill(hidden, -math.inf), dim=-1) @ v
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """The embedding's gradient travels early in plain replicas, and cuDNN computes the recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.recurrent = nn.RNN(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 32)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x + self.recurrent(x)[0])
        return logits


def train(where: torch.device, mesh: DeviceMesh | None = None) -> tuple[Weights, Weights]:
    """Weights on the CPU, before and after steps with everything, and what is found between them is checked."""
    torch.backends.cudnn.allow_tf32 = False  # the CPU has none
    dmuon.attention.by_class[Attention] = lambda _: dmuon.attention.Heads(HEADS, WIDTH // HEADS, query="q", key="k")
    torch.manual_seed(0)
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items() if name != "forwards"}
    data = torch.randint(0, 64, (STEPS + 2, BATCH, LENGTH))
    model.to(where)
    if mesh is not None:
        data = data.chunk(mesh.size(), dim=1)[dist.get_rank()]
    shards = mesh is not None and mesh.size(0) == 1
    dmuon.dedicate_params(model, mesh, replicated=not shards, costs="modelled")
    for module in [*model.blocks, model] if shards else []:
        fully_shard(module, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=1e-2, rule="normuon", ns_dtype=torch.float32)
    clip, ema = dmuon.QKClip(model, tau=0.05), dmuon.Ema(model, decay=0.5)
    scaler = torch.amp.GradScaler(where.type, init_scale=2.0**10)

    def step(tokens: torch.Tensor) -> None:
        for micro, around in zip(tokens.to(where).chunk(2), (dmuon.no_sync(model), nullcontext()), strict=True):
            with around:
                loss = nn.functional.cross_entropy(model(micro).flatten(0, 1), micro.flatten() % 32)
                scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        dmuon.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        ema.update()

    for number in range(STEPS):
        optimizer.record_stats = number == STEPS - 1
        step(data[number])
    largest = torch.cat([*clip.max_logits.values()])
    assert (largest > 0.05).any(), largest  # so it has clipped
    assert all(math.isfinite(figure) for of in dmuon.update_stats(model).values() for figure in of)
    assert dmuon.verify(model, optimizer)
    optimizer.record_stats = False
    states = model.state_dict(), optimizer.state_dict(), ema.state_dict()
    step(data[STEPS])  # which the load undoes
    for part, state in zip((model, optimizer, ema), states, strict=True):
        part.load_state_dict(state)
    dmuon.offload(model)
    dmuon.load(model)
    with ema.applied(), torch.no_grad():
        assert model.eval()(data[0].to(where)).isfinite().all()
    model.train()
    with dmuon.full_params(model, writeback=True):
        model.head.bias.data.mul_(0.5)
    step(data[STEPS + 1])
    assert optimizer.skipped_steps == 0
    return before, {name: whole(value).cpu() for name, value in model.state_dict().items() if name in before}


if __name__ == "__main__":
    run_rank(train)
