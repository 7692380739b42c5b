"""Attributes of parameters outlive dedicate_params, fully_shard and Muon, so groups can be made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Gpt, batch, loss_of, make_gpt
from torch.distributed.fsdp import fully_shard
from training import AHEAD, dedicate

import dmuon


class Ranked(nn.Parameter):
    """A parameter of a class of its own, which Muon leaves to AdamW."""


class Marked(nn.Linear):
    """Reads an attribute of its weight in the forward, and sets another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.num_uses = getattr(self.weight, "num_uses", 0) + 1
        return super().forward(x) * self.weight.built.factor


class Mark:
    """The value of an attribute, whose identity counts."""

    factor = 1.0


def build(device: str) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model = Gpt(depth=2)
        model.blocks[0].up = Marked(24, 41)
        model.blocks[0].again = nn.Linear(41, 24, bias=False)  # unused
        model.blocks[0].again.weight = model.blocks[0].down.weight
        model.norm.weight = Ranked(model.norm.weight.detach())
    return model


def marked(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every parameter by its name, also those that no module has as parameters for now."""
    for path, module in model.named_modules():
        for attribute in ("weight", "bias"):
            if getattr(module, attribute, None) is not None:
                yield f"{path}.{attribute}", getattr(module, attribute)


def marked_for_adamw(model: nn.Module) -> list[nn.Parameter]:
    adamws = {row.name for row in dmuon.routing_table(model) if row.algorithm == "adamw"}
    return [p for name, p in model.named_parameters() if name in adamws and isinstance(getattr(p, "built", 0), Mark)]


def attributes_of(mesh: Any, start: str) -> None:
    """Sets an attribute, named after the moment, at each moment, and `latest` anew. Expects them from then on."""
    model = build("meta" if start == "meta" else "cpu")
    marks, seen = dict[str, dict[str, Mark]](), 0

    def mark(when: str) -> None:
        """Of tied parameters the last mark counts."""
        marks[when] = {}
        for name, parameter in marked(model):
            marks[when][name] = Mark()
            setattr(parameter, when, marks[when][name])
            parameter.latest = marks[when][name]
        marks[when]["blocks.0.down.weight"] = marks[when]["blocks.0.again.weight"]
        marks["latest"] = marks[when]

    def expect() -> None:
        nonlocal seen
        seen += 1
        dict(model.named_parameters())  # as what makes groups does
        for when, of in marks.items():
            for name, parameter in marked(model):
                assert getattr(parameter, when, None) is of[name], f"{name}.{when}"

    def shard() -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    if start == "fully_shard first":
        shard()
    mark("built")
    dedicate(model, mesh, AHEAD)
    expect()
    mark("dedicated")
    if start != "fully_shard first":
        shard()
    expect()
    mark("sharded")
    if start == "meta":
        model.to_empty(device="cpu")
        expect()
        mark("memory")
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    opt = dmuon.Muon(model, adamw_groups=[{"params": marked_for_adamw(model), "lr": 0.125}])
    expect()
    mark("made")
    for step in range(2):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    expect()
    with dmuon.full_params(model):
        expect()
    assert seen == (6 if start == "meta" else 5)
    assert model.blocks[0].up.weight.num_uses == 2
    assert model.blocks[0].down.weight is model.blocks[0].again.weight
    by_lr = {group["lr"]: group["params"] for group in opt.param_groups if group["algorithm"] == "adamw"}
    assert set(by_lr) == {0.125}
    assert {id(p) for group in opt.param_groups for p in group["params"]} == set(map(id, model.parameters()))


@pytest.mark.cpu("its model lies on the CPU, which FSDP2 would move")
@pytest.mark.parametrize("start", ["plain", "meta", "fully_shard first"])
def test_attributes_of_parameters_outlive_set_up(ranks, start):
    ranks.run(attributes_of, (2, 2), start=start)


def of_a_dtensor(mesh: Any, name: str) -> dict[str, str]:
    """Returns what the errors say about an attribute that a DTensor has, of a matrix and of its gradient."""
    model, said = make_gpt(depth=2), {}

    def ask(when: str, tensor: Any) -> None:
        assert not hasattr(tensor, name)
        with pytest.raises(AttributeError) as raised:
            getattr(tensor, name)
        said[when] = str(raised.value)

    dedicate(model, mesh, AHEAD)
    ask("before Muon", model.blocks[1].up.weight)
    opt = dmuon.Muon(model)
    loss_of(model, batch(0)).backward()
    ask("weight", model.blocks[1].up.weight)
    ask("gradient", model.blocks[1].up.weight.grad)
    opt.step()
    return said


@pytest.mark.parametrize("name", ["full_tensor", "to_local", "device_mesh", "placements", "no_such_attribute"])
def test_an_attribute_that_a_dtensor_has_is_an_attribute_error_with_a_way_out(ranks, name):
    for said in ranks.run(of_a_dtensor, (2,), name=name):
        if name == "no_such_attribute":
            assert all(text.endswith(f"object has no attribute '{name}'") for text in said.values())
        else:
            assert all(text.startswith(f"dmuon: {name} on 'blocks.1.up.weight") for text in said.values())
            assert "dedicate_params, fully_shard, then model.to_empty" in said["before Muon"]
            assert "dmuon.full_params(model" in said["weight"] and "model.state_dict()" in said["weight"]
            assert "dmuon.grad_norms(model)" in said["gradient"]
