"""Buffers as DistributedDataParallel has them: those of the first rank, before the same forwards."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from tp_models import meshes
from training import place_of

import dmuon


class Normed(nn.Module):
    """Buffers that follow from the data alone, of several dtypes and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("flags", torch.zeros(2, 3, dtype=torch.bool))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("scalar", torch.zeros((), dtype=torch.bfloat16), persistent=False)
        self.register_buffer("gaps", torch.zeros(8, dtype=torch.complex64)[::2].real)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scalar += x.mean().bfloat16()
            self.gaps[1] += x.mean()
            self.flags[0, 1] = x[0, 0] > 0
        return self.linear(self.norm(x))


# (trains, under no_sync) of each forward.
FORWARDS = [(True, False), (True, True), (True, False), (False, False), (False, False), (True, False), (True, True)]


def forwards(mesh: Any, by: str, **options: Any) -> list[dict[str, torch.Tensor]]:
    """The buffers of this rank before the first and after each forward."""
    rank, _ = place_of(mesh)
    torch.manual_seed(0)
    model = Normed()
    model.norm.running_mean += rank  # ranks may differ before the first forward
    if by == "ddp":
        group = mesh.get_group() if mesh.ndim == 1 else torch.distributed.new_group(mesh.mesh.flatten().tolist())
        called: Any = DistributedDataParallel(model, process_group=group, init_sync=False)
        no_sync = called.no_sync
    else:
        dmuon.dedicate_params(model, mesh, costs="modelled", **options)
        dmuon.Muon(model)
        called, no_sync = model, lambda: dmuon.no_sync(model)
    seen = []
    torch.manual_seed(rank + 1)
    for trains, held in FORWARDS:
        model.train(trains)
        inputs = torch.randn(6, 8)
        with no_sync() if held else contextlib.nullcontext(), torch.set_grad_enabled(trains):
            loss = called(inputs).sum()
            if trains:
                loss.backward()
        seen.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    return seen


@pytest.mark.cpu("DistributedDataParallel has no emulated device")
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_buffers_are_those_of_distributed_data_parallel(ranks, mesh):
    expected = ranks.run(forwards, mesh, by="ddp")
    assert not torch.equal(expected[0][0]["norm.running_mean"], expected[1][0]["norm.running_mean"])
    for got, wanted in zip(ranks.run(forwards, mesh, by="dmuon", replicated=True), expected, strict=True):
        for after, (buffers, others) in enumerate(zip(got, wanted, strict=True)):
            for name, buffer in buffers.items():
                assert torch.equal(buffer, others[name]), f"{name} after forward {after}"


def test_buffers_are_copied_only_where_it_is_asked_for(ranks):
    def differ(**options: Any) -> bool:
        first, second, *_ = ranks.run(forwards, (4,), by="dmuon", **options)
        # An evaluation right after a training forward begins with the first rank's.
        return not torch.equal(first[3]["norm.running_mean"], second[3]["norm.running_mean"])

    assert not differ(broadcast_buffers=True)
    assert differ()
    assert differ(replicated=True, broadcast_buffers=False)


class Scaled(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def under_tensor_parallelism(mesh: Any) -> tuple[str, float]:
    """`parallelize_module` makes a DTensor of the buffer, whose values differ over the data-parallel ranks."""
    data, tensor = meshes((2, 2), mesh.device_type)
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(8, 8), nn.ReLU(), nn.Linear(8, 8))
    parallelize_module(model, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    dmuon.dedicate_params(model, data, replicated=True, costs="modelled")
    dmuon.Muon(model)
    model[0].scale.to_local().add_(data.get_local_rank())
    model(torch.ones(4, 8)).sum().backward()
    return type(model[0].scale).__name__, float(model[0].scale.full_tensor())


def test_buffers_of_modules_under_tensor_parallelism_are_copied(ranks):
    assert ranks.run(under_tensor_parallelism, (4,)) == [("DTensor", 1.0)] * 4
