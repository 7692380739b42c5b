"""Who plays a program: dmuon on ranks, one process without dmuon, or FSDP2 with AdamW on ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from model import INPUTS, Net, is_muons, make, select
from program import Options, Program
from reference import ReferenceMuon
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from training import LR, WEIGHT_DECAY, dedicate, place_of, weights_of

import dmuon

# Of the size of gradients here: a gradient that is nothing but noise then moves a weight by no more than noise.
ADAMW_EPS = 1e-2
ADAMW_LR = 1e-2
MAX_NORM = 0.1


def batch_of(step: int, micro: int, rank: int, number: int) -> torch.Tensor:
    """[5, INPUTS] of one rank and one of the models."""
    seed = ((step * 16 + micro) * 16 + rank) * 4 + number
    return torch.randn(5, INPUTS, generator=torch.Generator().manual_seed(seed))


class Side:
    """One process's part; `ranks` are those whose data it computes with."""

    ranks: Sequence[int]
    size: int
    dtype = torch.float32
    device = torch.device("cpu")
    models: list[Net]
    optimizers: list[Any]

    def scale(self) -> float:
        """What a rank's loss is multiplied by."""
        return 1.0

    def no_sync(self, model: Net) -> AbstractContextManager[None]:
        return nullcontext()

    def clip(self, model: Net) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    def weights(self, model: Net) -> dict[str, torch.Tensor]:
        """Whole, of all parameters."""
        return {name: p.detach().clone() for name, p in model.named_parameters()}


class Reference(Side):
    """One process that computes every rank's part; shares no code with dmuon."""

    def __init__(self, program: Program, dtype: torch.dtype, nudge: float = 0.0, muon: bool = True) -> None:
        """`nudge`: by how much each weight is changed at the start, relatively; `muon`: else AdamW has all."""
        self.ranks, self.size, self.dtype = range(program.size), program.size, dtype
        self.models = [make(program, number).to(dtype) for number in range(2 if program.second else 1)]
        self.optimizers = []
        torch.manual_seed(99)
        for model in self.models:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + nudge * torch.randn_like(parameter))
            names = [name for name, p in model.named_parameters() if muon and is_muons(name, p)]
            optimizer = ReferenceMuon(model, names, LR, WEIGHT_DECAY, adamw_lr=ADAMW_LR)
            if optimizer.adamw is not None:
                optimizer.adamw.param_groups[0]["eps"] = ADAMW_EPS
            self.optimizers.append(optimizer)

    def scale(self) -> float:
        return 1.0 / self.size


def shard(model: nn.Module, mesh: Any, wrap: str) -> None:
    if wrap == "none":
        return
    for block in model.blocks if wrap in ("blocks", "inner") else ():
        for module in block.modules() if wrap == "inner" else ():
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def on_device(model: Net, device: torch.device) -> Net:
    """As `.to` does on GPUs; on the emulated device that would part what is tied."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules() if device.type != "cpu" else ():
        for name, parameter in module.named_parameters(recurse=False):
            there = moved.setdefault(parameter, nn.Parameter(parameter.detach().to(device), parameter.requires_grad))
            setattr(module, name, there)
    return model


class OnRanks(Side):
    def __init__(self, mesh: Any, program: Program) -> None:
        rank, self.size = place_of(mesh)
        self.ranks = [rank]
        if mesh.device_type != "cpu":
            self.device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
        self.models, self.optimizers = [], []
        for number in range(2 if program.second else 1):
            model = on_device(make(program, number), self.device)
            self.optimizers.append(self.start(model, mesh, program))
            self.models.append(model)

    def start(self, model: Net, mesh: Any, program: Program) -> Any:
        raise NotImplementedError


class Dmuon(OnRanks):
    def __init__(self, mesh: Any, program: Program, options: Options) -> None:
        self.options = options
        super().__init__(mesh, program)

    def start(self, model: Net, mesh: Any, program: Program) -> Any:
        dedicate(model, mesh, vars(self.options), select=select)
        shard(model, mesh, program.wrap)
        return dmuon.Muon(
            model,
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            ns_dtype=torch.float32,
            adamw_lr=ADAMW_LR,
            adamw_eps=ADAMW_EPS,
        )

    def no_sync(self, model: Net) -> AbstractContextManager[None]:
        return dmuon.no_sync(model)

    def clip(self, model: Net) -> torch.Tensor:
        return dmuon.clip_grad_norm_(model, MAX_NORM)

    def weights(self, model: Net) -> dict[str, torch.Tensor]:
        return {name: weight.cpu() for name, weight in weights_of(model).items()}


class Stock(OnRanks):
    """What a program does without dmuon: FSDP2 and AdamW for all. Only where `fully_shard` manages parameters."""

    def start(self, model: Net, mesh: Any, program: Program) -> Any:
        shard(model, mesh, program.wrap)
        trainable = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            trainable, lr=ADAMW_LR, eps=ADAMW_EPS, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, foreach=False
        )

    @contextmanager
    def no_sync(self, model: Net) -> Iterator[None]:
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.set_requires_all_reduce(False, recurse=False)
        yield
        for module in modules:
            module.set_requires_all_reduce(True, recurse=False)

    def weights(self, model: Net) -> dict[str, torch.Tensor]:
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }
