"""Counts the kernels, launches of messages and waits of the host in a step.

Compares dmuon.Muon with AdamW under FSDP2, with FSDP2 over the parameters that dmuon does not take (`rest`), and with
the bare model. It counts, and does not time, on the asynchronous device of the tests (tests/async_device):
`make bench-counts`. The model is Qwen2.5-7B's block with all extents divided by 64, so it has as many matrices as the
real one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.emulated import emulated_mesh

HIDDEN, KEYS, INNER, VOCABULARY = 3584 // 64, 512 // 64, 18944 // 64, 100
MATRICES = 7  # of a block
PHASES = ("forward", "backward", "clip", "step")
KINDS = ("bare", "rest", "adamw", "dmuon")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.output = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key, self.value = nn.Linear(HIDDEN, KEYS), nn.Linear(HIDDEN, KEYS)
        self.gate, self.up = nn.Linear(HIDDEN, INNER, bias=False), nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.output(self.query(y) + (self.key(y) + self.value(y)).repeat(1, HIDDEN // KEYS))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


def make(kind: str, mesh: Any, num_blocks: int, device: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(num_blocks)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), *blocks, nn.Linear(HIDDEN, VOCABULARY)).to(device)
    matrices = {parameter for block in blocks for parameter in block.parameters() if parameter.ndim == 2}
    if kind == "dmuon":
        dmuon.dedicate_params(model, mesh, costs="modelled")
    for module in [*blocks, model] if kind != "bare" else []:
        fully_shard(module, mesh=mesh, ignored_params=matrices if kind == "rest" else set())
    if kind == "dmuon":
        return model, dmuon.Muon(model, lr=1e-2)
    others = (p for p in model.parameters() if kind != "rest" or p not in matrices)
    return model, torch.optim.AdamW(others, lr=1e-3, fused=True)


def clip_all_groups(model: nn.Module, max_norm: float) -> None:
    """torch's clipping takes sharded and whole gradients, but not at once."""
    for sharded in (True, False):
        parameters = [p for p in model.parameters() if isinstance(p, DTensor) == sharded]
        if parameters:
            nn.utils.clip_grad_norm_(parameters, max_norm)


def count(mesh: Any, kind: str, num_blocks: int) -> dict[str, dict[str, Any]]:
    """Counts the third step, by phase."""
    async_device = importlib.import_module("async_device")
    device = f"{mesh.device_type}:{torch.get_device_module(mesh.device_type).current_device()}"
    model, optimizer = make(kind, mesh, num_blocks, device)
    clip = dmuon.clip_grad_norm_ if kind == "dmuon" else clip_all_groups
    tokens = torch.randint(0, VOCABULARY, (16,), device=device)
    for _ in range(3):
        torch.accelerator.synchronize()
        async_device.reset_statistics()
        with async_device.phase("forward"):
            loss = nn.functional.cross_entropy(model(tokens), tokens)
        with async_device.phase("backward"):
            loss.backward()
        with async_device.phase("clip"):
            clip(model, 1.0)
        with async_device.phase("step"):
            optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    found = async_device.statistics()
    return {phase: found.get(phase, {}) for phase in PHASES}


def iteration(mesh: Any) -> dict[str, int]:
    """Kernels of Newton-Schulz, five steps, over one batch: square, wide and tall matrices."""
    async_device = importlib.import_module("async_device")
    found = {}
    for rows, cols in ((HIDDEN, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)):
        batch = torch.ones(4, rows, cols, device=torch.device(mesh.device_type, mesh.get_rank()))
        with async_device.phase(f"{rows} x {cols}"):
            dmuon.orthogonalize(batch)
        torch.accelerator.synchronize()
        found[f"{rows} x {cols}"] = int(async_device.statistics()[f"{rows} x {cols}"]["kernels"])
    return found


def total(counts: dict[str, Any], what: str) -> int:
    """The count of a phase. Sums waits over the operations that wait."""
    found = counts.get(what, 0)
    return sum(found.values()) if isinstance(found, dict) else int(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x2", help="nodes x ranks a node")
    parser.add_argument("--blocks", type=int, default=28)
    arguments = parser.parse_args()
    with emulated_mesh(arguments.mesh) as mesh:
        counts = {kind: count(mesh, kind, arguments.blocks) for kind in KINDS}
        if dist.get_rank() == 0:
            print(f"{arguments.blocks} blocks of {MATRICES} matrices on {arguments.mesh}, a step of rank 0")
            print(f"{'':9} {'kernels':>32} {'launches of messages':>32} {'waits of the host':>32}")
            print(f"{'':9} " + " ".join(f"{kind:>7}" for kind in KINDS * 3))
            for phase in PHASES:
                cells = [
                    total(counts[kind][phase], what)
                    for what in ("kernels", "communication_launches", "host_syncs")
                    for kind in KINDS
                ]
                print(f"{phase:9} " + " ".join(f"{cell:7}" for cell in cells))
            found = ", ".join(f"{kernels} for {shape}" for shape, kernels in iteration(mesh).items())
            print(f"of step(), Newton-Schulz launches a batch: {found}")


if __name__ == "__main__":
    main()
