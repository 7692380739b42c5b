"""CPU time of a training step's host side: dmuon.Muon beside FSDP2 with fused AdamW, as rank 0 of a large mesh.

The other ranks do not exist: torch's `fake` backend answers for them at once. Matrices are so small that little but the
host's work remains. The bare model, without any sharding, is the floor. `rest` uses FSDP2 and AdamW for all parameters
except the blocks' matrices, as dmuon does. `heads` measures dmuon alone: each projection is one matrix, or one for each
of 8 or 64 heads. `make bench-host`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import math
import statistics
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # which registers the backend

import dmuon

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.emulated import open_fake_device
from bench.interleave import orders, paired_ratio
from bench.provenance import provenance

KINDS = ("bare", "rest", "adamw", "dmuon")
HEADS = {"1 head": 1, "8 heads": 8, "64 heads": 64}  # kinds of dmuon
WIDEN = 4  # rows for a column, of projections with heads: so that 64 heads have some each
MODELS = ("matrices", "transformer", "heads")
PARTS = ("forward", "backward", "step")
VOCABULARY = 64
SCALE = 1e-9  # of the loss: buffers go round, and what are gradients here are weights of missing ranks there


class Block(nn.Module):
    """The 7 matrices of a transformer's block, and its norms, which may have weights."""

    def __init__(self, side: int, has_norms: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.mix = (nn.Linear(side, side, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(side, side, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.RMSNorm(side, elementwise_affine=has_norms) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.mix(self.query(y) + self.key(y) + self.value(y))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Projections(nn.Module):
    """7 projections, whose outputs are added up."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(side, elementwise_affine=False)
        self.projections = nn.ModuleList(nn.Linear(side, WIDEN * side, bias=False) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        total: Tensor = sum((projection(y) for projection in self.projections), torch.zeros(()))
        return x + total.unflatten(-1, (WIDEN, -1)).sum(-2)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks alone, or between an embedding and a head."""

    x: Tensor  # its input: on a GPU, FSDP2 calls no model without one

    def __init__(self, side: int, num_blocks: int, model: str) -> None:
        super().__init__()
        is_whole = model == "transformer"
        self.embedding = nn.Embedding(VOCABULARY, side) if is_whole else None
        self.blocks = nn.ModuleList(
            Projections(side) if model == "heads" else Block(side, has_norms=is_whole) for _ in range(num_blocks)
        )
        self.head = nn.Linear(side, VOCABULARY, bias=False) if is_whole else None
        x = torch.randint(0, VOCABULARY, (4,)) if is_whole else torch.randn(4, side)
        self.register_buffer("x", x, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = x if self.head is None else self.head(x)
        return output.square().mean()


class Subject:
    """A model, wrapped and optimised one way."""

    def __init__(self, kind: str, model: str, mesh: DeviceMesh, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = Model(options.side, options.blocks, model).to(options.device)
        if kind in HEADS:
            head_dim = WIDEN * options.side // HEADS[kind]
            dmuon.dedicate_params(self.model, mesh, select=lambda _, module, p: dmuon.views.per_head(p, head_dim))
        elif kind == "dmuon":
            head = self.model.head
            dmuon.dedicate_params(self.model, mesh, select=lambda _, module, p: False if module is head else None)
        matrices = {p for block in self.model.blocks for p in block.parameters() if p.ndim == 2}
        ignored = matrices if kind == "rest" else set()
        for module in [*self.model.blocks, self.model] if kind != "bare" else []:
            fully_shard(module, mesh=mesh, ignored_params=ignored)
        others = [p for p in self.model.parameters() if p not in ignored]
        self.optimizer: torch.optim.Optimizer | None = None
        if kind in HEADS:  # of smaller matrices a CPU iterates longer, which is no work of a host
            self.optimizer = dmuon.Muon(self.model, lr=1e-3, ns_steps=1, ns_dtype=torch.float32)
        elif kind == "dmuon":
            self.optimizer = dmuon.Muon(self.model, lr=1e-3)
        elif others:
            self.optimizer = torch.optim.AdamW(others, lr=1e-3, fused=True)

    def block(self, num_steps: int) -> list[float]:
        """Mean seconds of the CPU, of all threads of the process, in each part of a step."""
        spent = [0.0] * len(PARTS)
        for _ in range(num_steps):
            times = [time.process_time()]
            loss = SCALE * self.model(self.model.x)
            times.append(time.process_time())
            loss.backward()
            times.append(time.process_time())
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()
            times.append(time.process_time())
            spent = [total + after - before for total, (before, after) in zip(spent, pairwise(times), strict=True)]
        return [total / num_steps for total in spent]


def zero_new_memory(device: str, on: bool = True) -> None:
    """Fills new memory with zeros: the memory's content serves as the missing ranks' messages."""
    if device == "cpu":
        perturb = -6  # M_PERTURB of glibc's malloc.h: new bytes are the complement
        ctypes.CDLL(None).mallopt(perturb, 0xFF if on else 0)
    elif on:  # the caching allocator keeps what is freed here, and hands it out again
        kept = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (2**28, *[2**20] * 128)]
        del kept


def zero_unwritten_outputs() -> None:
    """Zeroes what the `fake` backend leaves unwritten before PyTorch 2.12: FSDP2's averaged gradients."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12):
        return
    reduce_scatter = dist.reduce_scatter_tensor

    def zeroed(output: Tensor, *args: Any, **options: Any) -> Any:
        return reduce_scatter(output.zero_(), *args, **options)

    dist.reduce_scatter_tensor = zeroed


def measure(mesh: DeviceMesh, model: str, options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Returns [round][part] for each kind."""
    zero_new_memory(options.device)
    kinds = ("bare", *HEADS) if model == "heads" else KINDS
    subjects = {kind: Subject(kind, model, mesh, options) for kind in kinds}
    for subject in subjects.values():
        subject.block(4)  # the first steps trace, and take the memory that later steps use
    zero_new_memory(options.device, on=False)
    found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for order in orders(kinds, options.rounds):
        for kind in order:
            found[kind].append(subjects[kind].block(options.steps))
    optimizers = [subject.optimizer for subject in subjects.values()]
    skipped = sum(each.skipped_steps for each in optimizers if isinstance(each, dmuon.Muon))
    said = f"{skipped} steps were skipped: what this process took for other ranks' values is not finite"
    if skipped and options.device == "cpu":
        raise SystemExit(said)
    if skipped:  # by a flag on the device, which the host does not read: it issues what it issues for other steps
        print(said)
    return found


def report(model: str, found: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Prints the medians, and returns them with the ratios to AdamW, or to one head."""
    base = "1 head" if model == "heads" else "adamw"
    sums = {kind: [sum(parts) for parts in rounds] for kind, rounds in found.items()}
    said: dict[str, Any] = {"median_ms": {}, "ratio": {}}
    for kind, rounds in found.items():
        medians = [1e3 * statistics.median(values) for values in (*zip(*rounds, strict=True), sums[kind])]
        ratio = paired_ratio(sums[kind], sums[base])
        said["median_ms"][kind] = dict(zip((*PARTS, "all"), medians, strict=True))
        said["ratio"][kind] = asdict(ratio)
        print(f"{model:12} {kind:8} " + " ".join(f"{value:9.2f}" for value in medians) + f"   {ratio}", flush=True)
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x8", help="nodes x ranks a node, of which this process is the first")
    parser.add_argument("--device", default="cpu", help="or cuda, where the host launches kernels; for tests emulated")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--blocks", type=int, default=28)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5, help="steps a round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = provenance()
    print("\n".join(f"{key}: {value}" for key, value in facts.items()))
    shape = tuple(int(extent) for extent in options.mesh.split("x"))
    if options.device != "cpu":
        logging.getLogger("dmuon").setLevel(logging.ERROR)  # see `measure`: no warning of each skipped step
    if options.device == "emulated":
        open_fake_device()
    # A store that keeps what it is given: the engine's watch asks it.
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("fake", store=store, rank=0, world_size=math.prod(shape))
    zero_unwritten_outputs()
    mesh = init_device_mesh(options.device, shape, mesh_dim_names=("replicate", "shard"))
    print(f"{options.blocks} blocks of 7 matrices of {options.side} x {options.side} on {options.mesh}, ms of a step")
    print(f"{'model':12} {'kind':8} " + " ".join(f"{part:>9}" for part in (*PARTS, "all")) + "   all / adamw, 1 head")
    said = {}
    for model in options.models.split(","):
        found = measure(mesh, model, options)
        said[model] = {**report(model, found), "seconds": found}
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**facts, **said}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
