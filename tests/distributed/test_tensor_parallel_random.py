"""Random models, cuts, meshes and programs under tensor parallelism are trained as on one process.

DMUON_NUM_MODELS says how many; the commit's tests play a few.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from cut import Cut
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint
from tp_models import errors, meshes, too_far, whole
from training import LR, WEIGHT_DECAY, dedicate

import dmuon

STEPS, ROWS, MOST = 3, 40, 0.2
MESHES = [(2, 2), (2, 2), (1, 4), (4, 1), (1, 2, 2), (2, 1, 2)]


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight of a block: its shape, its cut (a dimension, "replicated" or "plain"), and its matrices by dmuon."""

    shape: tuple[int, ...]
    cut: int | str
    views: tuple[dmuon.View, ...] = ()

    @property
    def matrices(self) -> tuple[dmuon.View, ...]:
        count = self.shape[0] if len(self.shape) == 3 else 1
        return self.views or (dmuon.View(count, *self.shape[-2:]),)


@dataclasses.dataclass(frozen=True)
class Program:
    dims: tuple[int, ...]
    width: int
    blocks: tuple[tuple[Weight, ...], ...]
    options: dict[str, Any]
    shards: bool
    shards_first: bool
    micros: int
    clips: bool
    checkpoints: bool


def draw_cut(rng: random.Random, sizes: tuple[int, ...], ranks: int) -> int | str:
    """A rank of the last place may have less, but not nothing."""
    fits = [dim for dim, size in enumerate(sizes) if -(-size // ranks) * (ranks - 1) < size]
    return rng.choice([*fits, *fits, "replicated", "plain"])


def draw(seed: int) -> Program:
    rng = random.Random(seed)
    dims = rng.choice(MESHES)
    ranks, width = dims[-1], rng.choice([8, 9, 12, 15])

    def weight(*shape: int, views: tuple[dmuon.View, ...] = ()) -> Weight:
        return Weight(shape, draw_cut(rng, shape, ranks), views)

    def block() -> tuple[Weight, ...]:
        kind, hidden = rng.choice(["pair", "pair", "experts", "heads", "fused"]), rng.choice([8, 13, 16, 20])
        if kind == "experts":
            return (weight(rng.choice([2, 4, 5]), width, width),)
        if kind == "heads":
            heads = rng.choice([4, 8])
            first = weight(heads * 3, width, views=(dmuon.View(heads, 3, width),))
            return first, weight(width, heads * 3)
        if kind == "fused":
            parts = (dmuon.View(1, 12, width), dmuon.View(2, 4, width))
            return weight(20, width, views=parts), weight(width, 20)
        return weight(hidden, width), weight(width, hidden)

    schedule = {
        "lookahead": rng.choice([0, 1, 3]),
        "node_copy": rng.random() < 0.5,
        "reshard_after_forward": rng.random() < 0.7,
        "strategy": rng.choice(["load_balance", "round_robin", "lpt", "rank0", "xor_layout"]),
    }
    shards = rng.random() < 0.8
    return Program(
        dims,
        width,
        tuple(block() for _ in range(rng.choice([1, 2, 3]))),
        schedule,
        shards,
        shards and rng.random() < 0.3,
        rng.choice([1, 1, 2]),
        rng.random() < 0.4,
        rng.random() < 0.3,
    )


class Block(nn.Module):
    """x + a function of x and of the weights, in DTensors if there is a mesh."""

    def __init__(self, weights: tuple[Weight, ...]) -> None:
        super().__init__()
        for number, weight in enumerate(weights):
            fan_in = weight.shape[-1]
            self.register_parameter(f"w{number}", nn.Parameter(torch.randn(weight.shape) / math.sqrt(fan_in)))
        self.mesh: DeviceMesh | None = None
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self._apply_to, x, use_reentrant=False) if self.checkpoints else self._apply_to(x)
        return x + y

    def _apply_to(self, x: torch.Tensor) -> torch.Tensor:
        for number, weight in enumerate(self._parameters.values()):
            x = torch.tanh(x) if number else x
            x = self._product(x, weight)
        return torch.tanh(x)

    def _product(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        is_cut = isinstance(weight, DTensor)
        held: Any = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False) if is_cut else x
        if weight.ndim == 3:
            y = torch.stack([held @ one.T for one in weight.unbind(0)]) if not is_cut else self._experts(held, weight)
            y = y.mean(0)
        else:
            y = held @ weight.T
        return y.redistribute(placements=[Replicate()]).to_local() if is_cut else y

    def _experts(self, x: Any, weight: Any) -> Any:
        return torch.bmm(x.unsqueeze(0).expand(weight.shape[0], -1, -1), weight.transpose(1, 2))


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.stem = nn.Linear(6, program.width)
        self.blocks = nn.ModuleList(Block(weights) for weights in program.blocks)
        self.head = nn.Linear(program.width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(program: Program) -> Model:
    torch.manual_seed(0)
    return Model(program)


def parallelize(model: Model, program: Program, mesh: DeviceMesh) -> None:
    for block, weights in zip(model.blocks, program.blocks, strict=True):
        block.mesh, block.checkpoints = mesh, program.checkpoints
        for number, weight in enumerate(weights):
            if weight.cut != "plain":
                placement = Replicate() if weight.cut == "replicated" else Shard(weight.cut)
                held = distribute_tensor(getattr(block, f"w{number}").detach(), mesh, [placement])
                block.register_parameter(f"w{number}", nn.Parameter(held))


def loss_of(model: nn.Module, step: int, part: int, micro: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + micro)
    x, y = (torch.randn(ROWS, n, generator=generator, device="cpu").to(like) for n in (6, 3))
    return (model(x) - y).square().mean()


def weight_of(program: Program, name: str) -> Weight | None:
    if not name.startswith("blocks"):
        return None
    _, block, attribute = name.split(".")
    return program.blocks[int(block)][int(attribute[1:])]


def matrices_of(program: Program, name: str) -> Any:
    weight = weight_of(program, name)
    if weight is None:
        return None

    def cut(tensor: torch.Tensor) -> list[torch.Tensor]:
        ends = [math.prod(view.sizes) for view in weight.matrices]
        runs = tensor.reshape(-1).split(ends)
        return [one for run, view in zip(runs, weight.matrices, strict=True) for one in run.view(view.sizes)]

    return cut


def alone(program: Program, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = make(program).to(dtype)
    optimizer = Cut(model, lambda name: matrices_of(program, name))
    parts = math.prod(program.dims[:-1])
    for step in range(STEPS):
        for part in range(parts):
            for micro in range(program.micros):
                (loss_of(model, step, part, micro, model.head.weight) / parts / program.micros).backward()
        if program.clips:
            nn.utils.clip_grad_norm_(model.parameters(), MOST)
        optimizer.step()
    return {name: p.detach().double() for name, p in model.named_parameters()}


def on_ranks(mesh: DeviceMesh, program: Program) -> dict[str, torch.Tensor]:
    data, tensor = meshes(program.dims, mesh.device_type)
    assert tensor is not None
    model = make(program)
    parallelize(model, program, tensor)

    def shard() -> None:
        for block in model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)

    def select(name: str, module: nn.Module, parameter: nn.Parameter) -> Any:
        weight = weight_of(program, name)
        return False if weight is None else weight.matrices

    if program.shards_first:
        shard()
    dedicate(model, data, program.options, select=select)
    if program.shards and not program.shards_first:
        shard()
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    part = data.mesh.flatten().tolist().index(dist.get_rank())
    like = torch.empty(0, device=mesh.device_type)
    for step in range(STEPS):
        for micro in range(program.micros):
            with dmuon.no_sync(model) if micro + 1 < program.micros else nullcontext():
                (loss_of(model, step, part, micro, like) / program.micros).backward()
        if program.clips:
            dmuon.clip_grad_norm_(model, MOST)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: whole(value) for name, value in model.state_dict().items()}
    with dmuon.full_params(model):
        full = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(torch.equal(full[name], value) for name, value in found.items())
    assert dmuon.verify(model, optimizer)
    return found


@pytest.mark.parametrize("seed", range(int(os.environ.get("DMUON_NUM_MODELS", "10"))))
def test_random_models_are_trained_as_on_one_process(ranks, seed):
    program = draw(seed)
    before = {name: p.detach().double() for name, p in make(program).named_parameters()}
    exact, rounded = alone(program, torch.float64), alone(program, torch.float32)
    most = {name: max(1e-5, 4 * error) for name, error in errors(before, exact, rounded).items()}
    for found in ranks.run(on_ranks, (4,), program=copy.deepcopy(program)):
        assert not too_far(before, exact, found, most), program
