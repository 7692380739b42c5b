"""What `dmuon.inventory` writes is read as the model's own matrices: a plan made of it fits the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from dmuon._command.main import main
from dmuon._planning.inventory import inventory_of, routed

import dmuon
from dmuon import _plan


class Mixed(nn.Module):
    """Matrices of the root, before and after blocks, and one that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 16))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.last = nn.Linear(8, 16)


dmuon.views.by_class[Mixed] = {"first": dmuon.views.matrix}


@pytest.mark.parametrize("model", [Mixed(), nn.Linear(4, 6), Mixed().blocks], ids=["mixed", "one", "list"])
def test_a_plan_made_of_it_fits_the_model(model: nn.Module, tmp_path: Path):
    (tmp_path / "model.json").write_text(json.dumps(dmuon.inventory(model)))
    files = ["--inventory", f"{tmp_path}/model.json", "--save", f"{tmp_path}/plan.json"]
    assert main(["plan", *files, "--mesh", "2", "--device", "cpu"]) == 0
    plan = _plan.Plan.from_json((tmp_path / "plan.json").read_text())
    items = inventory_of(*routed(model, "inventory", None))
    assert items
    plan.require_fit(items, _plan.Mesh(1, 2))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.empty(12, 512, 1024, device="meta"))  # which is worth dividing
        self.qkv = nn.Linear(8, 12, bias=False)
        self.stored = nn.Parameter(torch.randn(8, 6))  # [in, out]


def of_several_views(
    name: str, module: nn.Module, parameter: nn.Parameter
) -> dmuon.View | tuple[dmuon.View, ...] | None:
    if name.endswith("stored"):
        return dmuon.views.transposed(dmuon.views.columns(parameter, 2))
    return dmuon.views.qkv(parameter, 4, 1) if name.endswith("qkv.weight") else None


def test_parts_of_parameters_are_the_same_in_files_and_in_the_model(tmp_path: Path):
    model = nn.ModuleList(Experts() for _ in range(3))
    (tmp_path / "model.json").write_text(json.dumps(dmuon.inventory(model, select=of_several_views)))
    files = ["--inventory", f"{tmp_path}/model.json", "--save", f"{tmp_path}/plan.json"]
    assert main(["plan", *files, "--mesh", "4", "--device", "cpu"]) == 0
    plan = dmuon.Plan.load(tmp_path / "plan.json")
    items = plan.native.inventory
    names = [item.name for item in items if item.unit == 0]
    stack = [f"0.stack[{i}:{i + 1}]" for i in range(12)]
    assert names == [*stack, "0.stored", "0.qkv.weight[0:1]", "0.qkv.weight[1:3]"]
    assert [item.continues for item in items if item.unit == 0] == [False, *[True] * 11, False, False, True]
    assert [item.shape_text() for item in items[12:15]] == ["8 x 2*3 transposed", "8 x 8", "2 of 2 x 8"]
    made = dmuon.plan(model, (1, 4), device="cpu", select=of_several_views)
    assert made.to_json() == plan.to_json()
    plan.native.require_fit(made.native.inventory, _plan.Mesh(1, 4))


@pytest.mark.parametrize("strategy", ["load_balance", "milp"])
def test_the_command_decides_as_python_does(strategy: str, tmp_path: Path, capsys):
    (tmp_path / "model.json").write_text(json.dumps(dmuon.inventory(Mixed())))
    assert main(["plan", "--inventory", f"{tmp_path}/model.json", "--mesh", "2", "--strategy", strategy, "--json"]) == 0
    got, expected = json.loads(capsys.readouterr().out), dmuon.plan(Mixed(), (1, 2), strategy=strategy)
    assert got["strategy"] == expected.strategy == strategy
    assert got == json.loads(expected.to_json())
    assert got["makespan_ms"] <= dmuon.plan(Mixed(), (1, 2), strategy="round_robin").makespan_ms


def test_a_model_without_values_has_the_same_inventory_and_plan():
    with torch.device("meta"):
        hollow = Mixed()
    assert dmuon.inventory(hollow) == dmuon.inventory(Mixed())
    assert dmuon.plan(hollow, (1, 2)).to_json() == dmuon.plan(Mixed(), (1, 2)).to_json()


def test_what_has_no_inventory_is_refused_by_name():
    model = Mixed()
    dmuon.dedicate_params(model)
    with pytest.raises(ValueError, match=r"inventory: model: '\(root\)' is dedicated already"):
        dmuon.inventory(model)
    with pytest.raises(ValueError, match=r"inventory: model: '0' is dedicated already"):
        dmuon.inventory(nn.Sequential(model))
    with pytest.raises(ValueError, match=r"dedicate_params: model: '0' is dedicated already"):
        dmuon.dedicate_params(nn.Sequential(model))
    with pytest.raises(ValueError, match=r"inventory: model: expected a torch.nn.Module, got NoneType"):
        dmuon.inventory(None)
    for function in (dmuon.inventory, lambda part: dmuon.plan(part, (1, 2)), dmuon.dedicate_params):
        with pytest.raises(ValueError, match=r": model: '0\.0' is dedicated already"):
            function(model.blocks)
    with pytest.raises(ValueError, match=r"inventory: model: 'weight' has no shape yet"):
        dmuon.inventory(nn.LazyLinear(4))


@pytest.mark.parametrize("content", [b"\xff\xfe\0", b"{", b"[]"])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: bytes):
    path = tmp_path / "binary"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"plan: cannot read '.*binary'"):
        dmuon.Plan.load(path)
    with pytest.raises(ValueError, match=r"plan: costs: cannot read '.*binary'"):
        dmuon.plan(Mixed(), (1, 2), costs=path)


def test_arguments_of_a_plan_are_checked_by_name():
    with pytest.raises(ValueError, match=r"plan: strategy: expected one of .*milp.*, got 'best'"):
        dmuon.plan(Mixed(), (1, 2), strategy="best")
    with pytest.raises(ValueError, match=r"^plan: costs: expected the path .* got 'measured'"):
        dmuon.plan(Mixed(), (1, 2), costs="measured")
    with pytest.raises(ValueError, match=r"^plan: costs: expected a path, got 3"):
        dmuon.plan(Mixed(), (1, 2), costs=3)
    with pytest.raises(ValueError, match=r"^plan: device: expected one of .*a800-sxm4-80gb.*, got None"):
        dmuon.plan(Mixed(), (1, 2), device=None)
    with pytest.raises(ValueError, match=r"plan: mesh: "):
        dmuon.plan(Mixed(), (2**40, 1))


def test_a_saved_plan_of_views_fits_the_model_that_selects_them(tmp_path: Path):
    def select(name: str, _: nn.Module, parameter: nn.Parameter) -> dmuon.View | None:
        return dmuon.views.gate_up(parameter) if name == "first" else None

    plan = dmuon.plan(Mixed(), (1, 1), select=select, device="cpu")
    plan.save(str(tmp_path / "plan.json"))
    model = Mixed()
    dmuon.dedicate_params(model, plan=str(tmp_path / "plan.json"), select=select)
    optimizer = dmuon.Muon(model)
    assert optimizer.plan.to_json() == plan.to_json()
    model = Mixed()
    dmuon.dedicate_params(model, plan=str(tmp_path / "plan.json"))
    with pytest.raises(ValueError, match="expected 'first', 8 x 16, unit 0; the plan has 'first', 2 of 4 x 16, unit 0"):
        dmuon.Muon(model)
