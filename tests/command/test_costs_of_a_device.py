"""`dmuon plan` and `compare` with a table of measured costs for a device of the catalogue."""

from __future__ import annotations

import json

import pytest
from dmuon._command.main import main

from dmuon import _plan

DEVICES = ("cpu", "h200-sxm5-141gb")


@pytest.fixture
def planned(capsys, tmp_path):
    """Runs a command for pi0 with costs that were measured elsewhere."""
    costs = json.loads(_plan.modelled_costs(_plan.model("pi0").inventory, "h200-sxm5-141gb").to_json())
    (tmp_path / "costs.json").write_text(json.dumps(costs | {"source": "measured"}))

    def run(command, *arguments):
        task = (command, "--model", "pi0", "--costs", str(tmp_path / "costs.json"), "--json", *arguments)
        assert main([*task]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


def test_a_device_gives_a_plan_all_but_its_costs(planned):
    for device in DEVICES:
        plan = planned("plan", "--mesh", "2x2", "--strategy", "rank0", "--device", device)
        options, is_cpu = plan["options"], device == "cpu"
        assert plan["costs"]["source"] == "measured" and options["on_cpu"] == is_cpu
        assert options.get("reserve_bytes", 0) == (0 if is_cpu else 2**31)
    assert plan == planned("plan", "--mesh", "2x2", "--strategy", "rank0")


def test_slices_travel_over_the_links_of_the_device(planned):
    task = ("--mesh", "2", "--tp", "2", "--strategy", "rank0", "--device")
    slow, fast = (planned("plan", *task, device)["makespan_ms"] for device in DEVICES)
    assert slow > fast


def test_strategies_are_compared_for_a_device(planned):
    task = ("--mesh", "2x2", "--strategy", "rank0", "--device", "cpu")
    (row,) = planned("compare", *task)
    assert row["makespan_ms"] == planned("plan", *task)["makespan_ms"]
