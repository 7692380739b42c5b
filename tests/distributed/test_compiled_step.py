"""A step in a function under torch.compile, as PyTorch's recipe for optimizers has it, trains as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from models import batch, loss_of, make_gpt, part
from training import AHEAD, dedicate, place_of, shard, weights_of

import dmuon


def trained(mesh: Any, parts: tuple[str, ...], compiled: bool) -> dict[str, torch.Tensor]:
    model = make_gpt(depth=1)
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    opt = dmuon.Muon(model, lr=0.05)
    scaler = torch.amp.GradScaler(mesh.device_type, init_scale=4.0, enabled="scaler" in parts)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)

    def step() -> None:
        if "scaler" in parts:
            scaler.unscale_(opt)
        if "clip" in parts:
            dmuon.clip_grad_norm_(model, 0.01)
        if "scaler" in parts:
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()
        if "schedule" in parts:
            scheduler.step()
        if "zero_grad" in parts:
            opt.zero_grad()

    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, backend="eager")
    for number in range(3):
        loss = loss_of(model, part(batch(number), *place_of(mesh)))
        scaler.scale(loss).backward()
        step()
        opt.zero_grad()
    return weights_of(model)


@pytest.mark.cpu("Dynamo does not know the emulated device")
@pytest.mark.parametrize(
    "parts", [(), ("clip", "zero_grad"), ("scaler",), ("scaler", "clip", "schedule", "zero_grad")], ids="-".join
)
def test_a_compiled_step_trains_as_without(ranks, parts):
    expected = ranks.run(trained, (2, 2), parts=parts, compiled=False)
    for weights, plain in zip(ranks.run(trained, (2, 2), parts=parts, compiled=True), expected, strict=True):
        assert all(torch.equal(value, weights[name]) for name, value in plain.items())


@pytest.mark.filterwarnings("error:Dynamo does not know how to trace")
def test_a_compiled_forward_backward_and_step_trace_nothing_of_dmuons():
    """Autograd runs dmuon's hooks inside of the compiled function."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    dmuon.dedicate_params(model, costs="modelled")
    opt = dmuon.Muon(model)
    before = model.state_dict()["0.weight"]

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()

    torch.compile(step, backend="eager")()
    assert not torch.equal(before, model.state_dict()["0.weight"])


@pytest.mark.parametrize("of", ["Muon.step sends", "Muon.zero_grad changes", "clip_grad_norm_ sends"])
def test_a_graph_without_breaks_is_refused_by_name(of):
    model = nn.Linear(4, 4)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    calls = {"Muon.step sends": opt.step, "Muon.zero_grad changes": opt.zero_grad}
    call = calls.get(of, lambda: dmuon.clip_grad_norm_(model, 1.0))
    compiled = torch.compile(lambda: call(), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=rf"dmuon\.{of}"):
        compiled()
