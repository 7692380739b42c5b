"""Stacks of experts that are divided over the ranks of a node are trained as on one process that has all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from cut import Cut
from models import weights_of_plain
from refusals import REFUSED, Refusals, expect_refusal
from scenario import assert_equal_to_reference
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from training import AHEAD, LR, NO_COPY, ON_DEMAND, WEIGHT_DECAY, dedicate, place_of, shard, weights_of

import dmuon

EXPERTS, WIDTH, HIDDEN, STEPS = 8, 6, 10, 4
MOST = 0.5  # of the gradients' norm: less than any here


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
    """A token goes to two experts: by its first element, and to the next one; expert 5 gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.group: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, tokens = 0, x
        if self.group is not None:
            first, tokens = dist.get_rank(self.group) * len(self.down), _ToAll.apply(x, self.group)
        chosen = (tokens[:, 0].detach().abs() * 100).long() % EXPERTS
        out = torch.zeros_like(tokens)
        for expert in range(len(self.down)):
            here = (chosen == first + expert) | ((chosen + 1) % EXPERTS == first + expert)
            gate, up = (tokens @ self.gate_up[expert].T).chunk(2, -1)
            made = (F.silu(gate) * up) @ self.down[expert].T
            out = out + made * (here & (first + expert != 5))[:, None]
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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def node_of(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[1]]


def divide(model: Model, mesh: DeviceMesh) -> None:
    """Each rank keeps its part of the experts, as expert parallelism leaves it: without a collective of its own."""
    for block in model.blocks:
        block.experts.group = mesh.get_group()
        for name in ("gate_up", "down"):
            values = getattr(block.experts, name).detach()
            local = values.chunk(mesh.size())[mesh.get_local_rank()].clone()
            setattr(block.experts, name, nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False)))


def select(name: str, module: nn.Module, parameter: nn.Parameter) -> dmuon.View | None:
    return dmuon.views.gate_up(parameter) if name.endswith("experts.gate_up") else None


def matrices_of(name: str) -> Callable[[torch.Tensor], list[torch.Tensor]] | None:
    if name.endswith("gate_up"):
        return lambda p: [half for expert in p for half in (expert[:HIDDEN], expert[HIDDEN:])]
    if name.endswith("down"):
        return list
    return (lambda p: [p]) if name.endswith("weight") else None


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """Of this rank's part of 12 rows."""
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(x.chunk(size)[rank]).square().mean()


@pytest.fixture(scope="module")
def reference() -> list[dict[str, torch.Tensor]]:
    """The weights before the first step and after the last, on one process."""
    model = make_model()
    weights = [weights_of_plain(model)]
    cut = Cut(model, matrices_of)
    for step in range(STEPS):
        loss_of(model, step, 0, 1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MOST)
        cut.step()
    return [*weights, weights_of_plain(model)]


def train(mesh: DeviceMesh, schedule: dict[str, Any], held: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Also saves and loads everything, in the middle, and says what the plan, the table and `verify` say."""
    model = make_model()
    divide(model, node_of(mesh))
    dedicate(model, mesh, schedule, select=select, **options)
    shard(model, mesh)
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    before = dmuon.verify(model, optimizer)
    rank, size = place_of(mesh)
    for step in range(STEPS):
        for part in range(2 if held else 1):
            with dmuon.no_sync(model) if held and part == 0 else nullcontext():
                (loss_of(model, step, rank, size) / (2 if held else 1)).backward()
        dmuon.clip_grad_norm_(model, MOST)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            saved = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
            loss_of(model, 100, rank, size).backward()
            optimizer.step()  # which what was saved undoes
            optimizer.zero_grad()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    owners = {row.name: row.owner for row in dmuon.routing_table(model)}
    after = dmuon.verify(model, optimizer)
    return {"weights": weights_of(model), "saved": whole, "ok": before.ok and after.ok, "owners": owners}


@pytest.mark.parametrize(
    ("mesh", "schedule", "held", "options"),
    [
        ((4,), AHEAD, False, {}),
        ((2, 2), AHEAD, True, {}),
        ((2, 2), ON_DEMAND, False, {"strategy": "round_robin"}),
        ((2, 2), NO_COPY, True, {"sync_from_rank0": True}),
    ],
)
def test_divided_stacks_are_trained_as_on_one_process(ranks, reference, mesh, schedule, held, options):
    for got in ranks.run(train, mesh, schedule=schedule, held=held, options=options):
        assert_equal_to_reference(*reference, got["weights"])
        for name, weight in got["weights"].items():
            assert torch.equal(got["saved"][name], weight), name
        assert got["ok"]
        assert sorted(got["owners"]["blocks.1.experts.down"]) == [0, 1, 2, 3]


refused = Refusals()


@refused("'blocks.0.experts.gate_up' is divided by experts over ranks", "Expected: over the ranks of a node")
def over_nodes(mesh: DeviceMesh) -> None:
    model = make_model()
    divide(model, mesh["replicate"])
    dedicate(model, mesh, AHEAD, select=select)


@refused("'blocks.0.experts.down' is divided by experts over 2 ranks, and is AdamW's", "Expected: Muon")
def by_adamw(mesh: DeviceMesh) -> None:
    model = make_model()
    divide(model, node_of(mesh))
    dedicate(model, mesh, AHEAD, select=lambda name, *_: False if name.endswith("down") else None)


@refused("has 8 experts with views of [1] matrices", "Expected: equally many experts on each rank, and one view")
def as_one_matrix(mesh: DeviceMesh) -> None:
    model = make_model()
    divide(model, node_of(mesh))
    dedicate(model, mesh, AHEAD, select=lambda name, *_: dmuon.View(1, 160, 6) if name.endswith("gate_up") else None)


@refused("1 of 21 parameters have other values", "'blocks.1.experts.down of column 1' (on ranks 3)")
def replicas_that_differ(mesh: DeviceMesh) -> None:
    model = make_model()
    divide(model, node_of(mesh))
    if mesh.get_rank() == 3:
        model.blocks[1].experts.down.data.to_local()[0, 0, 0] += 1
    dedicate(model, mesh, AHEAD, select=select)
    dmuon.Muon(model)


@pytest.mark.parametrize(REFUSED, refused)
def test_what_no_owner_could_own_is_refused(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
