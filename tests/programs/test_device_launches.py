"""What set-up and checkpoints launch on the asynchronous device."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.nn as nn

import dmuon

pytestmark = pytest.mark.xdist_group("async_device")


def launches(mesh: Any, num_layers: int) -> dict[str, int]:
    """The communications that a rank launches, by what it does."""
    import async_device

    async_device.reset()
    async_device.configure(order="random", seed=mesh.get_rank())
    device = torch.device("emulated", torch.emulated.current_device())
    torch.manual_seed(0)
    block = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(num_layers)))  # one unit
    model = nn.Sequential(block).to(device)
    timeout = datetime.timedelta(seconds=600 + num_layers)  # groups of its own
    dmuon.dedicate_params(model, mesh, costs="modelled", timeout=timeout)
    with async_device.phase("set-up"):
        opt = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    model(torch.ones(2, 16, device=device)).square().mean().backward()
    opt.step()
    with async_device.phase("save"):
        state = model.state_dict()
    with async_device.phase("load"):
        model.load_state_dict(state)
    torch.emulated.synchronize()
    counts = async_device.statistics()
    return {name: counts[name]["communication_launches"] for name in ("set-up", "save", "load")}


@pytest.mark.parametrize(("mesh", "stages"), [((2, 2), 2), ((4,), 1)])
def test_launches_do_not_grow_with_the_number_of_matrices(device_ranks, mesh, stages):
    for few, many in zip(*(device_ranks.run(launches, mesh, num_layers=count) for count in (4, 8)), strict=True):
        assert few == many
        assert few["save"] == stages
        assert few["load"] == stages + 1, "the shards, and the weights that owners publish then"


# NCCL makes a communicator at its first message, which takes seconds and memory and may fail.
@pytest.mark.parametrize(("mesh", "groups"), [((2, 2), 2), ((4,), 1)])
def test_communicators_are_made_in_set_up(device_ranks, mesh, groups):
    assert [found["set-up"] for found in device_ranks.run(launches, mesh, num_layers=5)] == [groups] * 4


def calls_of_a_step(mesh: Any, num_units: int) -> int:
    """The calls of c10d by dmuon in a step that replays a trace."""
    import async_device

    async_device.reset()
    device = torch.device("emulated", torch.emulated.current_device())
    torch.manual_seed(0)
    units = (nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(mesh.size()))) for _ in range(num_units))
    model = nn.Sequential(*units).to(device)
    dmuon.dedicate_params(model, mesh, costs="modelled")
    opt = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    for step in range(3):
        with async_device.phase(f"step {step}"):
            model(torch.ones(2, 32, device=device)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    torch.emulated.synchronize()
    return int(async_device.statistics()["step 2"]["messages"])


@pytest.mark.parametrize(("mesh", "calls"), [((2, 2), 5), ((4,), 3)])
def test_a_unit_of_equal_parts_is_one_call_a_stage_and_use(device_ranks, mesh, calls):
    few, many = (device_ranks.run(calls_of_a_step, mesh, num_units=count) for count in (2, 4))
    assert [(b - a) / 2 for a, b in zip(few, many, strict=True)] == [calls] * 4
