"""What `dmuon.inventory` writes is read as the model's own matrices: a plan made of it fits the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn

import dmuon
from dmuon import _C
from dmuon.plan import _routed, inventory_of

COMMAND = Path(sys.executable).parent / "dmuon"


class Mixed(nn.Module):
    """Matrices of the root, before and after blocks, and one that two blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, 16))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8)) for _ in range(3))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.last = nn.Linear(8, 16)


@pytest.mark.skipif(not COMMAND.exists(), reason="the command is not installed")
@pytest.mark.parametrize("model", [Mixed(), nn.Linear(4, 6), Mixed().blocks], ids=["mixed", "one", "list"])
def test_a_plan_made_of_it_fits_the_model(model: nn.Module, tmp_path: Path):
    (tmp_path / "model.json").write_text(json.dumps(dmuon.inventory(model)))
    arguments = ["plan", "--inventory", "model.json", "--mesh", "2", "--device", "cpu", "--save", "plan.json"]
    subprocess.run([COMMAND, *arguments], cwd=tmp_path, capture_output=True, check=True)
    plan = _C.Plan.from_json((tmp_path / "plan.json").read_text())
    items = inventory_of(*_routed(model))
    assert items
    plan.require_fit(items, _C.Mesh(1, 2))
