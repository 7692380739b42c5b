"""What tensor parallelism cannot have is refused by name on all ranks; views that it cuts train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn as nn
from reference import ReferenceMuon
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from tp_models import meshes, whole, worst_error
from training import LR, WEIGHT_DECAY, dedicate

import dmuon

WIDTH, HIDDEN, STEPS = 16, 32, 2


class Pair(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair(hidden), Pair(hidden)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, HIDDEN, WIDTH, device="cpu") / 4)
        self.down = nn.Parameter(torch.randn(4, WIDTH, HIDDEN, device="cpu") / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mesh = self.up.device_mesh if isinstance(self.up, DTensor) else None
        y: Any = x if mesh is None else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        y = torch.einsum("teh,edh->td", torch.einsum("td,ehd->teh", y, self.up).tanh(), self.down)
        if mesh is not None:
            y = y.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        return x + y


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Experts(), Experts()])


def pairs(model: nn.Module, mesh: DeviceMesh, gathered: bool = False) -> None:
    between = Replicate() if gathered else Shard(-1)
    styles = {"up": ColwiseParallel(output_layouts=between), "down": RowwiseParallel(input_layouts=between)}
    for block in model.blocks:
        parallelize_module(block, mesh, styles)


def divide(model: nn.Module, mesh: DeviceMesh, **placements: Any) -> None:
    for experts in model.blocks:
        for name, placement in placements.items():
            setattr(experts, name, nn.Parameter(distribute_tensor(getattr(experts, name).data, mesh, [placement])))


Select = Callable[[str, nn.Module, nn.Parameter], Any]


def of(end: str, view: Callable[[nn.Parameter], Any]) -> Select:
    return lambda name, module, parameter: view(parameter) if name.endswith(end) else None


HEADS = of("up.weight", lambda p: dmuon.views.per_head(p, 8))
ROWS = of("down.weight", dmuon.views.gate_up)
QKV = of("up.weight", lambda p: dmuon.views.qkv(p, num_heads=4, num_kv_heads=2))

Cuts = Mapping[str, Callable[[torch.Tensor], list[torch.Tensor]]]
# By name: model, its division, views, the same cuts of one tensor by the end of its name.
TRAINED: dict[str, tuple[Callable[[], nn.Module], Callable[..., None], Select | None, Cuts]] = {
    "heads on single ranks": (Net, pairs, HEADS, {"up.weight": lambda p: list(p.split(8))}),
    "QKV cut across, so that a rank has nothing of K and V": (
        Net,
        pairs,
        QKV,
        {"up.weight": lambda p: list(p.split([16, 8, 8]))},
    ),
    "gate_up cut across": (Net, pairs, ROWS, {"down.weight": lambda p: list(p.chunk(2))}),
    "33 rows": (lambda: Net(33), lambda model, mesh: pairs(model, mesh, gathered=True), None, {}),
    "whole experts": (Mixture, lambda model, mesh: divide(model, mesh, up=Shard(0), down=Shard(0)), None, {}),
    "cut experts": (Mixture, lambda model, mesh: divide(model, mesh, up=Shard(1), down=Shard(2)), None, {}),
}


def loss_of(model: nn.Module, step: int, part: int) -> torch.Tensor:
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(100 * step + part), device="cpu")
    x = x.to(next(model.parameters()).device)
    return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()


def train(mesh: DeviceMesh, name: str, **muon: Any) -> float:
    make, parallelize, select, cuts = TRAINED[name]
    data, tensor = meshes((2, 2), mesh.device_type)
    torch.manual_seed(0)
    model = make()
    parallelize(model, tensor)
    dedicate(model, data, {}, select=select)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=data)
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32, **muon)
    torch.manual_seed(0)
    alone = make()
    before = {key: p.detach().clone() for key, p in alone.named_parameters()}
    matrices = [key for key, value in before.items() if value.ndim > 1]
    own = {key: list for key in matrices if before[key].ndim == 3}
    own |= {key: cut for key in matrices for end, cut in cuts.items() if key.endswith(end)}
    reference = ReferenceMuon(alone, matrices, LR, WEIGHT_DECAY, cuts=own, **muon)
    for step in range(STEPS):
        loss_of(model, step, data.get_local_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for part in range(2):
            (loss_of(alone, step, part) / 2).backward()
        reference.step()
        reference.zero_grad()
    saved = {key: whole(value) for key, value in model.state_dict().items()}
    return worst_error(before, {key: p.detach() for key, p in alone.named_parameters()}, saved)


@pytest.mark.parametrize("name", TRAINED)
def test_trains_as_on_one_process(ranks, name):
    for error in ranks.run(train, (4,), name=name):
        assert error <= 1e-5


def test_decays_slices_with_caution_as_on_one_process(ranks):
    for error in ranks.run(train, (4,), name="heads on single ranks", cautious_weight_decay=True):
        assert error <= 1e-5


def rule_of_whole_matrices(mesh: DeviceMesh, rule: str) -> str:
    data, tensor = meshes((2, 2), mesh.device_type)
    model = Net()
    pairs(model, tensor)
    dedicate(model, data, {})
    with pytest.raises(ValueError) as error:
        dmuon.Muon(model, rule=rule)
    return str(error.value)


@pytest.mark.parametrize("rule", ["normuon", "adamuon"])
def test_refuses_a_rule_that_needs_whole_matrices(ranks, rule):
    for message in ranks.run(rule_of_whole_matrices, (4,), rule=rule):
        assert f"Muon: rule: expected 'muon' for a model under tensor parallelism, got '{rule}'" in message


def of_one_mesh(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    pairs(model, mesh["tensor"])
    return mesh["data"]


def on_all_ranks(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    pairs(model, mesh["tensor"])
    return mesh


def open_sum(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    for block in model.blocks:
        local = block.up.weight.data
        block.up.weight = nn.Parameter(DTensor.from_local(local, mesh["tensor"], [Partial()], run_check=False))
    return mesh["data"]


def over_two_dimensions(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    mesh = init_device_mesh(mesh.device_type, (1, 2, 2), mesh_dim_names=("data", "first", "second"))
    for block in model.blocks:
        value = distribute_tensor(block.up.weight.data, mesh["first", "second"], [Shard(0), Shard(1)])
        block.up.weight = nn.Parameter(value)
    return mesh["data"]


def without_names(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    rows, rank = mesh.mesh.tolist(), torch.distributed.get_rank()
    of_rows = [DeviceMesh(mesh.device_type, row) for row in rows]
    of_columns = [DeviceMesh(mesh.device_type, list(column)) for column in zip(*rows, strict=True)]
    pairs(model, next(one for one in of_rows if rank in one.mesh.tolist()))
    return next(one for one in of_columns if rank in one.mesh.tolist())


def in_descending_order(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    mesh = DeviceMesh(mesh.device_type, [[1, 0], [3, 2]], mesh_dim_names=("data", "tensor"))
    pairs(model, mesh["tensor"], gathered=True)
    return mesh["data"]


def fused(model: nn.Module, mesh: DeviceMesh) -> DeviceMesh:
    for block in model.blocks:
        placement = _StridedShard(0, split_factor=2)
        value = DTensor.from_local(block.up.weight.data[:16], mesh["tensor"], [placement], run_check=False)
        block.up.weight = nn.Parameter(value)
    return mesh["data"]


# By the words that are expected: how a model is divided, its hidden width and views.
REFUSED: dict[str, tuple[Callable[..., DeviceMesh], int, Select | None]] = {
    "expected the data-parallel part of the mesh, e.g. mesh['dp'], got": (on_all_ranks, HIDDEN, None),
    "Expected: Shard or Replicate; redistribute it before": (open_sum, HIDDEN, None),
    "tensor parallelism over one dimension of the device mesh": (over_two_dimensions, HIDDEN, None),
    "are not parts of one mesh with names": (without_names, HIDDEN, None),
    "which do not ascend": (in_descending_order, HIDDEN, None),
    "PyTorch saves such matrices with rows in another order": (fused, HIDDEN, None),
    "at least one of its 1 in dimension 0 on each rank": (
        of_one_mesh,
        1,
        lambda name, module, parameter: True if "weight" in name else None,
    ),
    "up.weight' is in a model under tensor parallelism, and has a view of interleaved rows, 8*(3 + 1) x 16": (
        of_one_mesh,
        HIDDEN,
        lambda name, module, parameter: dmuon.views.interleaved(parameter, [3, 1]) if "up.weight" in name else None,
    ),
}


def refuse(mesh: DeviceMesh, words: str) -> str:
    divided, hidden, select = REFUSED[words]
    torch.manual_seed(0)
    model = Net(hidden)
    mesh = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("data", "tensor"))
    mesh = divided(model, mesh)
    with pytest.raises(ValueError) as error:
        dedicate(model, mesh, {}, select=select)
    return str(error.value)


@pytest.mark.parametrize("words", REFUSED)
def test_is_refused_by_name(ranks, words):
    for message in ranks.run(refuse, (4,), words=words):
        assert message.startswith("dedicate_params: m")
        assert words in message


def parallelize_late(mesh: DeviceMesh) -> str:
    data, tensor = meshes((2, 2), mesh.device_type)
    model = Net()
    dedicate(model, data, {})
    with pytest.raises(ValueError) as error:
        pairs(model, tensor)
    return str(error.value)


def test_parallelize_module_comes_first(ranks):
    for message in ranks.run(parallelize_late, (4,)):
        assert "Expected: parallelize_module, then" in message


class Borrowing(Net):
    """Its last block uses a weight of its first, beside a tensor or a DTensor."""

    def __init__(self, as_dtensor: bool) -> None:
        super().__init__()
        self.as_dtensor = as_dtensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        mesh = meshes((2, 2), x.device.type)[1]
        held = DTensor.from_local(x, mesh, [Replicate()], run_check=False) if self.as_dtensor else x
        return nn.functional.linear(held, self.blocks[0].up.weight)


def borrow(mesh: DeviceMesh, as_dtensor: bool) -> str:
    data, tensor = meshes((2, 2), mesh.device_type)
    torch.manual_seed(0)
    model = Borrowing(as_dtensor)
    pairs(model, tensor)
    dedicate(model, data, {})
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=data)
    optimizer = dmuon.Muon(model)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as error:
        model(torch.randn(4, WIDTH))
    with pytest.raises(RuntimeError) as own:  # of a DTensor that is no weight of dmuon's
        model.blocks[0](distribute_tensor(torch.randn(4, WIDTH), tensor, [Replicate()]) + torch.ones(1))
    assert "dmuon" not in str(own.value)
    assert optimizer is not None
    return str(error.value)


@pytest.mark.parametrize("as_dtensor", [True, False])
def test_a_cut_weight_of_another_module_is_named(ranks, as_dtensor):
    for message in ranks.run(borrow, (4,), as_dtensor=as_dtensor):
        assert "'blocks.0.up.weight' is divided by tensor parallelism, S(0) on ranks" in message
        assert "Expected: a call of that module" in message
