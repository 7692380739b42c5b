"""Options of planning beside a plan that is made, and milp where SciPy does not answer."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import plan_cases
import plan_option_cases as cases
import pytest
import scipy.optimize
from dmuon._planning import milp
from models import make_gpt

import dmuon
from dmuon import _plan


@pytest.fixture
def path(ranks, tmp_path):
    """Of a saved plan for 2 x 2 ranks."""
    path = str(tmp_path / "plan.json")
    ranks.run(plan_cases.saved, (2, 2), path=path)
    return path


@pytest.mark.parametrize(
    "options", [{"strategy": "rank0"}, {"costs": "costs.json"}, {"layout_slack": 0.5, "strategy": "lpt"}], ids=str
)
def test_what_decides_a_plan_is_refused_beside_one_on_every_rank(ranks, path, options):
    messages = ranks.run(plan_cases.error, (2, 2), plan=path, **options)
    assert len(set(messages)) == 1
    for name, value in options.items():
        assert name in messages[0] and repr(value) in messages[0]
    assert messages[0].startswith("dedicate_params: plan: expected no ")


def test_ranks_that_differ_in_it_all_raise(ranks, path):
    messages = ranks.run(cases.error_where_one_differs, (2, 2), plan=path, here={"strategy": "rank0"})
    assert all("ranks differ" in message for message in messages)


def test_a_loaded_plan_may_not_exceed_max_memory_bytes(ranks, path):
    peak = max(dmuon.Plan.load(path).memory_bytes)
    for message in ranks.run(plan_cases.error, (2, 2), plan=path, max_memory_bytes=peak - 1):
        assert f"max_memory_bytes: expected >= {peak}" in message
        assert path in message and f"got {peak - 1}" in message
    assert ranks.run(plan_cases.error, (2, 2), plan=path, max_memory_bytes=peak) == [""] * 4


@pytest.mark.parametrize("options", [{"mesh": (1, 2)}, {"strategy": "lpt", "costs": "costs.json"}], ids=str)
def test_a_model_with_muon_has_its_plan_and_no_other(ranks, options):
    for message in ranks.run(cases.error_of_plan, (2, 2), given=options):
        assert message.startswith(f"plan: {', '.join(options)}: expected only for a model without dmuon.Muon")
        assert all(repr(value) in message for value in options.values())


@pytest.mark.parametrize("mesh", [None, 8, (8,), (0, 8), (2, -4), (2, 4, 1), "2x4"])
@pytest.mark.parametrize("strategy", ["load_balance", "milp"])
def test_a_mesh_is_two_positive_numbers(mesh, strategy):
    with pytest.raises(ValueError, match=r"plan: mesh: expected \(nodes, GPUs a node\) .*got"):
        dmuon.plan(make_gpt(), mesh, strategy=strategy)


def test_where_scipy_finds_nothing_in_time_load_balance_decides_which_is_said(monkeypatch, caplog):
    timed_out = SimpleNamespace(x=None, status=1, message="Time limit reached.")
    monkeypatch.setattr(scipy.optimize, "milp", lambda *_, **__: timed_out)
    with caplog.at_level(logging.WARNING, "dmuon"):
        plan = dmuon.plan(make_gpt(), (2, 4), strategy="milp")
    assert plan.to_json() == dmuon.plan(make_gpt(), (2, 4)).to_json()
    assert "Time limit reached" in caplog.text and "load_balance decides" in caplog.text


def test_without_scipy_milp_still_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ValueError, match="expected SciPy"):
        dmuon.plan(make_gpt(), (2, 4), strategy="milp")


def table(*entries):
    shapes = ", ".join(
        f'{{"rows": 8, "cols": 4, "tensor_parallel": {over}, "batches": [{{"size": 1, "ns": {ns}}}, '
        f'{{"size": 2, "ns": {pair}}}]}}'
        for over, ns, pair in entries
    )
    return _plan.CostTable.from_json(f'{{"schema_version": 1, "source": "a test", "shapes": [{shapes}]}}')


def test_milp_takes_no_times_over_tensor_parallelism():
    """By which one owner had better take both matrices."""
    items = [_plan.Matrix(str(i), 8, 4, i) for i in range(2)]
    times = table(("false", 10, 20), ("true", 40, 10))
    plan = milp.make_plan(items, _plan.Mesh(1, 2), times, _plan.PlanOptions())
    assert (plan.strategy, sorted(plan.loads_ns)) == ("milp", [10, 10])
    with pytest.raises(ValueError, match="expected an entry for shape 8 x 4; got none"):
        milp.make_plan(items, _plan.Mesh(1, 2), table(("true", 10, 10)), _plan.PlanOptions())
