"""One GPT, wrapped and optimised one way, with a timed training step."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.gpt import GPT, GPTConfig, Towers, multiplies_bf16
from bench.muon_ag import MuonAG
from bench.text import Text

T = TypeVar("T")

NAMES = ("adamw", "muon_ag", "dmuon")
# "ddp" is AdamW under DistributedDataParallel, "replicated" is dmuon in its place; both without fully_shard.
LABELS = {"adamw": "AdamW", "muon_ag": "Muon-AG", "dmuon": "dmuon", "ddp": "DDP", "replicated": "replicated"}


def label_of(name: str) -> str:
    """The name to print.

    "dmuon:RULE" is dmuon with another rule of update. "dmuon@FOLDER" is dmuon with another DMUON_CACHE_DIR: other tuned
    choices, or none.
    """
    base, at, folder = name.partition("@")
    kind, _, rule = base.partition(":")
    return (rule or LABELS[kind]) + at + Path(folder).name


@dataclass(frozen=True)
class Cluster:
    """This process's device, the mesh (None: no process group), this process's rank, and tensor parallelism's mesh."""

    device: torch.device
    mesh: DeviceMesh | None
    rank: int
    num_ranks: int
    tensor: DeviceMesh | None = None

    @property
    def part(self) -> int:
        """This process's part of the data, which the ranks of tensor parallelism share."""
        return self.rank if self.tensor is None else self.rank // self.tensor.size()

    def barrier(self) -> None:
        if self.mesh is not None:
            dist.barrier()

    def mean(self, values: Tensor) -> Tensor:
        """Averages a tensor over all ranks."""
        if self.mesh is not None:
            dist.all_reduce(values)
        return values / self.num_ranks

    def gather(self, value: T) -> list[T]:
        """Gathers one value a rank on every rank."""
        values = [value] * self.num_ranks
        if self.mesh is not None:
            dist.all_gather_object(values, value)
        return values


def open_cluster(mesh: str | None, tensor_parallel: int = 1) -> Cluster:
    """Under torchrun the mesh "G" or "RxG" (default: one row of all ranks); alone, no process group.

    With tensor parallelism this is the data-parallel mesh, of fewer ranks.

    A mesh of one replica is made 1-D, so that nobody pays for collectives over groups of one. If a process alone asks
    for a mesh, it is FSDP2 on one rank.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = [int(size) for size in mesh.split("x")] if mesh else [num_ranks // tensor_parallel]
    if torch.Size(sizes).numel() * tensor_parallel != num_ranks or len(sizes) > 2:
        raise SystemExit(
            f"--mesh: expected G or RxG with a product of {num_ranks} ranks, --tp included; got {mesh} and "
            f"{tensor_parallel}"
        )
    if num_ranks == 1 and mesh is None:
        return Cluster(torch.device(kind), None, 0, 1)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {}
    if "WORLD_SIZE" not in os.environ:
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", **alone)
    sizes = sizes[1:] if sizes[0] == 1 and len(sizes) == 2 else sizes
    names = ("replicate", "shard")[-len(sizes) :]
    if tensor_parallel == 1:
        return Cluster(device, init_device_mesh(kind, tuple(sizes), mesh_dim_names=names), dist.get_rank(), num_ranks)
    whole = init_device_mesh(kind, (*sizes, tensor_parallel), mesh_dim_names=(*names, "tensor"))
    return Cluster(device, whole[names], dist.get_rank(), num_ranks, whole["tensor"])


def parallelize(model: Any, mesh: DeviceMesh) -> None:
    """Divides the blocks' matrices over the ranks of tensor parallelism."""
    for block in model.blocks:
        plan: Any = {
            "attention.qkv": ColwiseParallel(output_layouts=Replicate()),
            "attention.out": RowwiseParallel(input_layouts=Replicate()),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


@dataclass(frozen=True)
class Rates:
    """Peak learning rates; the other parameters of Muon-AG and dmuon train with AdamW's."""

    adamw: float = 2e-3
    muon: float = 2e-2
    weight_decay: float = 0.1


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one training step on this rank, of the device; and until the host had issued it."""

    forward: float
    backward: float
    optimizer: float
    host: float

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.optimizer


def mean_times(times: list[list[StepTimes]]) -> list[StepTimes]:
    """[rank][step] to [step], each part the mean over the ranks."""
    return [
        StepTimes(*(statistics.fmean(parts) for parts in zip(*map(astuple, steps), strict=True)))
        for steps in zip(*times, strict=True)
    ]


class Contender:
    """A freshly seeded GPT with its optimizer; any two start from the same weights and read the same text."""

    def __init__(
        self,
        name: str,
        config: GPTConfig,
        text: Text,
        cluster: Cluster,
        *,
        dtype: str,
        rates: Rates,
        seed: int = 0,
        dedicate: Mapping[str, Any] | None = None,  # options of dmuon.dedicate_params
        configure: Callable[[nn.Module], None] | None = None,  # called before dmuon.Muon
    ) -> None:
        self.name, self.num_steps = name, 0
        self._text, self._cluster = text, cluster
        # Without FSDP2 nobody casts for us.
        is_whole = cluster.mesh is None or name in ("ddp", "replicated")
        self._autocast = dtype == "bf16" and is_whole and multiplies_bf16()
        mp_policy = MixedPrecisionPolicy()
        if dtype == "bf16" and (not is_whole or (self._autocast and name == "replicated")):
            mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        torch.manual_seed(seed)
        with cluster.device:  # where large models get their random weights faster
            self.model = (Towers if config.towers == 2 else GPT)(config)
        self.called: nn.Module = self.model  # or what wraps it
        self.routing = ""
        self.optimizer = self._build(mp_policy, rates, dedicate or {}, configure)
        self.scheduler: torch.optim.lr_scheduler.LRScheduler | None = None

    def _build(
        self,
        mp_policy: MixedPrecisionPolicy,
        rates: Rates,
        dedicate: Mapping[str, Any],
        configure: Callable[[nn.Module], None] | None,
    ) -> torch.optim.Optimizer:
        model, mesh = self.model, self._cluster.mesh
        betas, decay = (0.9, 0.95), rates.weight_decay
        if self._cluster.tensor is not None:
            parallelize(model, self._cluster.tensor)
        base, at, folder = self.name.partition("@")
        kind, _, rule = base.partition(":")
        if kind in ("dmuon", "replicated"):
            import dmuon

            dedicate = {"replicated": kind == "replicated", **dedicate}
            dmuon.dedicate_params(model, mesh, mp_policy=mp_policy, **dedicate)  # the one line before fully_shard
        if mesh is not None and kind not in ("ddp", "replicated"):
            # Blocks that nobody calls belong to the root's group.
            for block in () if isinstance(model, Towers) else model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=mp_policy)
            fully_shard(model, mesh=mesh, mp_policy=mp_policy)
        if kind == "ddp":
            self.called = DistributedDataParallel(model)
        match kind:
            case "adamw" | "ddp":
                by_mesh: dict[Any, list[nn.Parameter]] = {}  # a fused kernel takes DTensors of one mesh
                for weight in model.parameters():
                    by_mesh.setdefault(getattr(weight, "device_mesh", None), []).append(weight)
                groups = [{"params": weights} for weights in by_mesh.values()]
                return torch.optim.AdamW(groups, lr=rates.adamw, betas=betas, weight_decay=decay, fused=True)
            case "muon_ag":
                if self._cluster.tensor is not None:
                    raise SystemExit("--tp: expected --optim adamw,dmuon, got muon_ag, which gathers no slices")
                blocks = [model.blocks, *([model.others] if isinstance(model, Towers) else [])]
                matrices = [weight for part in blocks for weight in part.parameters() if weight.ndim == 2]
                chosen = set(matrices)
                rest = [weight for weight in model.parameters() if weight not in chosen]
                return MuonAG(
                    matrices, rest, lr=rates.muon, weight_decay=decay, adamw_lr=rates.adamw, adamw_betas=betas
                )
            case "dmuon" | "replicated":
                if configure is not None:
                    configure(model)
                with mock.patch.dict(os.environ, {"DMUON_CACHE_DIR": folder} if at else {}):
                    optimizer: torch.optim.Optimizer = dmuon.Muon(
                        model,
                        lr=rates.muon,
                        weight_decay=decay,
                        adamw_lr=rates.adamw,
                        adamw_betas=betas,
                        rule=rule or "muon",
                    )
                self.routing = str(dmuon.routing_table(model))
                return optimizer
        raise SystemExit(f"optimizer: expected one of {', '.join(NAMES)}; got {self.name}")

    def train(self, num_steps: int) -> tuple[list[StepTimes], Tensor]:
        """Trains on. Returns the times of each step on this rank, and the losses, mean over ranks.

        Ranks start together. Omit the first step from a comparison: then an optimizer whose
        communication outlives its `step()` has as much of it in flight at the start as at the end.
        """
        part = self._cluster.part
        batches = [self._text.train_batch(self.num_steps + i, part) for i in range(num_steps)]
        self.num_steps += num_steps
        self.model.train()
        clock, losses = _Clock(self._cluster.device), []
        self._cluster.barrier()
        for tokens, targets in batches:
            clock.mark()
            loss = self._loss(tokens, targets)
            clock.mark()
            loss.backward()
            clock.mark()
            self.optimizer.step()
            self.optimizer.zero_grad()
            clock.mark()
            losses.append(loss.detach())
            if self.scheduler is not None:
                self.scheduler.step()
        spans, host = clock.seconds(), clock.host_seconds()
        times = [StepTimes(*(*spans[i : i + 3], sum(host[i : i + 3]))) for i in range(0, len(spans), 4)]
        return times, self._cluster.mean(torch.stack(losses))

    @torch.no_grad()
    def evaluate(self, num_batches: int) -> float:
        """Mean validation loss over as many batches a rank, in nats a byte."""
        self.model.eval()
        batches = [self._text.validation_batch(i, self._cluster.part) for i in range(num_batches)]
        losses = torch.stack([self._loss(tokens, targets) for tokens, targets in batches])
        return self._cluster.mean(losses.mean()).item()

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self._cluster.device.type, torch.bfloat16, enabled=self._autocast):
            logits = self.called(tokens)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class _Clock:
    """Marks in time: on CUDA events on the compute stream, so that measuring does not serialise."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._instants: list[float] = []

    def mark(self) -> None:
        self._instants.append(time.perf_counter())
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def seconds(self) -> list[float]:
        """Between each mark and the one after."""
        if not self._cuda:
            return self.host_seconds()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._events)]

    def host_seconds(self) -> list[float]:
        return [after - before for before, after in pairwise(self._instants)]
