"""Set-up on the asynchronous device if no mesh says that the model will be there."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

import dmuon

pytestmark = pytest.mark.xdist_group("async_device")


def make() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)))
    model.register_buffer("seen", torch.ones(3))
    return model


def train(mesh: Any, given: DeviceMesh | None, moved: str, index: int | None = None, **options: Any) -> torch.Tensor:
    """Two steps; `moved` says when the model goes to the device: before dedicate_params, after it or never."""
    device = torch.device("emulated", torch.emulated.current_device() if index is None else index)
    model = make()
    if moved == "before":
        model.to(device)
    dmuon.dedicate_params(model, given, costs="modelled", **options)
    if moved == "after":
        model.to(device)
    opt = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    for step in range(2):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
        model(inputs).square().mean().backward()
        opt.step()
        opt.zero_grad()
    weights = (value for name, value in model.state_dict().items() if name.endswith("weight"))
    return torch.cat([weight.full_tensor().cpu().flatten() for weight in weights])


def with_and_without_mesh(mesh: Any, moved: str) -> bool:
    return torch.equal(train(mesh, None, moved), train(mesh, mesh, "before"))


@pytest.mark.parametrize("moved", ["before", "after"])
def test_without_a_mesh_the_device_is_that_of_the_process_groups_backend(device_ranks, moved):
    assert device_ranks.run(with_and_without_mesh, (4,), moved=moved) == [True] * 4


def with_another_current_device(mesh: Any) -> tuple[bool, set[str]]:
    """Returns whether weights are right, and the devices on which collectives of torch's ran."""
    expected, device, seen = train(mesh, mesh, "before"), torch.emulated.current_device(), set()

    def seeing(collective: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            seen.add(tensor.device)
            return collective(tensor, *args, **options)

        return call

    with (
        mock.patch.object(dist, "all_reduce", seeing(dist.all_reduce)),
        mock.patch.object(dist, "broadcast", seeing(dist.broadcast)),
        torch.emulated.device((device + 1) % 4),
    ):
        got = train(mesh, None, "before", device, broadcast_buffers=True)
    return torch.equal(got, expected), {str(one) for one in seen if one.type != "cpu"}


def test_messages_are_where_the_model_is_whatever_device_is_the_current_one(device_ranks):
    for rank, (is_equal, seen) in enumerate(device_ranks.run(with_another_current_device, (4,))):
        assert is_equal
        assert seen == {f"emulated:{rank}"}


class Branched(nn.Module):
    """A large embedding, which plain replicas send early, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.to(device)
        self.side = torch.emulated.Stream()

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        main = torch.emulated.current_stream()
        for index, block in enumerate(self.blocks):
            x = x + block(x).relu()
            if index == 2:
                self.side.wait_stream(main)
                with torch.emulated.stream(self.side):
                    branch = self.embedding(tokens)
                main.wait_stream(self.side)
                branch.record_stream(main)
                x = x + 2 * branch  # of `x + branch` autograd itself would add to a gradient that the side stream reads
        return x


def trained_on_two_streams(mesh: Any, order: str) -> tuple[list[str], int, bool]:
    import async_device

    async_device.reset()
    async_device.configure(order=order, seed=mesh.get_rank())
    torch.manual_seed(0)
    device = torch.device("emulated", torch.emulated.current_device())
    model = Branched(device)
    dmuon.dedicate_params(model, mesh, replicated=True, costs="modelled")
    opt = dmuon.Muon(model)
    for _ in range(4):
        x, tokens = torch.randn(8, 64).to(device), torch.randint(0, 64, (8,)).to(device)
        model(x, tokens).square().mean().backward()
        opt.step()
        opt.zero_grad()
    torch.emulated.synchronize()
    return async_device.races(), opt.skipped_steps, bool(opt._runtime.plain._places)


@pytest.mark.parametrize("order", ["compute_first", "side_first"])
def test_a_large_gradient_of_another_stream_travels_when_it_is_there(device_ranks, order):
    for races, num_skipped, is_early in device_ranks.run(trained_on_two_streams, (4,), order=order):
        assert (races, num_skipped, is_early) == ([], 0, True)


def refused(mesh: Any, moved: str) -> str:
    with pytest.raises(ValueError, match="Expected") as error:
        train(mesh, None, moved)
    return str(error.value)


def test_a_model_that_stays_on_the_cpu_is_refused_on_every_rank(device_ranks):
    for message in device_ranks.run(refused, (4,), moved="never"):
        assert "Muon: model: '0.0.weight' is on cpu, and the mesh of dedicate_params on emulated." in message
        assert "model.to('emulated') before Muon" in message
