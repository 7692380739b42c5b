"""A model with stacks of experts, and how expert parallelism leaves it: each rank of a node has some of the experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from mixture import Blocks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dmuon

EXPERTS, WIDTH, HIDDEN = 8, 6, 10


class _ToAll(torch.autograd.Function):
    """[tokens of a rank] -> [tokens of all ranks of the group], one rank's after the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.size = group, len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.size)[dist.get_rank(ctx.group)], None


class _SumToOwn(torch.autograd.Function):
    """What each rank made of all ranks' tokens -> the sums for this rank's own tokens."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Experts(nn.Module):
    """A token goes to two experts: by its first element, and to the next one; expert 5 gets none.

    Where `few`, there are tokens for the first three alone. A stack without tokens gets no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.group: Any = None
        self.few = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, tokens = 0, x
        gate_ups, downs = (p.to_local() if isinstance(p, DTensor) else p for p in (self.gate_up, self.down))
        if self.group is not None:
            first, tokens = dist.get_rank(self.group) * len(downs), _ToAll.apply(x, self.group)
        chosen = (tokens[:, 0].detach().abs() * 100).long() % (2 if self.few else EXPERTS)
        out = tokens * 0
        for expert in range(len(downs)):
            here = (chosen == first + expert) | ((chosen + 1) % EXPERTS == first + expert)
            if not here.any() or first + expert == 5:
                continue
            gate, up = (tokens @ gate_ups[expert].T).chunk(2, -1)
            out = out + (F.silu(gate) * up) @ downs[expert].T * here[:, None]
        return out if self.group is None else _SumToOwn.apply(out, self.group)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.proj(x))
        return x + self.out(self.experts(x))


def make_model() -> Blocks:
    torch.manual_seed(0)
    return Blocks(Block)


def node_of(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[1]]


def divide(model: Blocks, mesh: DeviceMesh) -> None:
    """Each rank keeps its part of the experts, as expert parallelism leaves it: without a collective of its own."""
    for block in model.blocks:
        block.experts.group = mesh.get_group()
        for name in ("gate_up", "down"):
            values = getattr(block.experts, name).detach()
            local = values.chunk(mesh.size())[mesh.get_local_rank()].clone()
            setattr(block.experts, name, nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False)))


IN_COLUMNS = "blocks.1.experts.down"  # two blocks of columns, as if its rows were inputs


def select(name: str, module: nn.Module, parameter: nn.Parameter) -> dmuon.View | None:
    if name == IN_COLUMNS and parameter.requires_grad:
        return dmuon.views.transposed(dmuon.views.columns(parameter, 2))
    return dmuon.views.gate_up(parameter) if name.endswith("experts.gate_up") else None


def matrices_of(name: str) -> Callable[[torch.Tensor], list[torch.Tensor]] | None:
    if name == IN_COLUMNS:
        return lambda p: [half.T for expert in p for half in (expert[:, : HIDDEN // 2], expert[:, HIDDEN // 2 :])]
    if name.endswith("gate_up"):
        return lambda p: [half for expert in p for half in (expert[:HIDDEN], expert[HIDDEN:])]
    if name.endswith("down"):
        return list
    return (lambda p: [p]) if name.endswith("weight") else None


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """Of this rank's part of 12 rows."""
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
    for block in model.blocks:
        block.experts.few = step == 2
    return model(x.chunk(size)[rank]).square().mean()
