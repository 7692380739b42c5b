"""Planning a model that no rank trains: `dmuon.plan`, and the strategy milp."""

from __future__ import annotations

import logging
import random
import sys
from types import SimpleNamespace

import pytest
import scipy.optimize
import torch.nn as nn
from dmuon._planning import milp

import dmuon
from dmuon import _plan


def make_model() -> nn.Module:
    """Three blocks of four matrices."""
    sizes = [(24, 72), (24, 24), (24, 41), (41, 24)]
    blocks = (nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes) for _ in range(3))
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks)})


def small_instance(seed):
    """Shapes with batch times that no formula gives, small enough for the MILP to be solved to the end."""
    draw = random.Random(seed)
    shapes = {}
    for index in range(draw.randint(1, 3)):
        one = draw.randint(100, 1000)
        sizes = [1, *sorted(draw.sample([2, 3, 4, 6, 8], draw.randint(0, 3)))]
        shapes[8 * (index + 1), 16] = (
            draw.randint(1, 14),
            [(b, int(one * b ** draw.uniform(0.5, 1.05))) for b in sizes],
        )
    return shapes, draw.randint(2, 4)


@pytest.mark.parametrize("seed", range(12))
def test_load_balance_is_within_a_percent_of_the_milp_that_is_proved(seed):
    shapes, num_owners = small_instance(seed)
    counts, proved = milp.solve(list(shapes.values()), num_owners)
    assert proved
    items = [_plan.Parameter(f"{shape}.{i}", *shape, i) for shape, (number, _) in shapes.items() for i in range(number)]
    table = _plan.CostTable("a test", [((1, *shape), times) for shape, (_, times) in shapes.items()])
    mesh, options = _plan.Mesh(1, num_owners), _plan.PlanOptions()
    best = _plan.make_plan_from_counts(items, mesh, "milp", counts, table, options)
    ours = _plan.make_plan(items, mesh, "load_balance", table, options)
    assert ours.makespan_ns <= 1.01 * best.makespan_ns
    assert ours.bound_ns <= best.makespan_ns


def test_nothing_to_assign_is_assigned():
    assert milp.solve([], 2) == ([[], []], True)
    assert milp.solve([(0, [(1, 5)])], 2) == ([[0], [0]], True)


def test_the_milp_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ValueError, match=r"pip install 'dmuon\[milp\]'"):
        milp.solve([(2, [(1, 5)])], 2)


def test_beyond_its_threshold_the_milp_leaves_it_to_load_balance_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(milp, "MOST_VARIABLES", 3)
    plan = dmuon.plan(make_model(), (2, 4), strategy="milp")
    assert plan.strategy == "load_balance"
    assert "load_balance decides" in caplog.text


def test_any_model_can_be_planned():
    model = make_model()
    plan = dmuon.plan(model, (2, 4), device="a800-sxm4-80gb")
    assert len(plan.owner) == 12 and len(plan.loads_ms) == 8
    assert plan.bound_ms <= plan.makespan_ms == max(plan.loads_ms)
    with pytest.raises(ValueError, match="mesh"):
        dmuon.plan(model)
    with pytest.raises(ValueError, match="a800-sxm4-80gb"):
        dmuon.plan(model, (2, 4), device="abacus")
    with pytest.raises(ValueError, match=r"plan: rule: expected one of .*adamuon; got 'shampoo'"):
        dmuon.plan(model, (2, 4), rule="shampoo")
    by_rule = [dmuon.plan(model, (2, 4), rule=rule).native.memory for rule in ("muon", "adamuon")]
    assert [3 * adamuon.state for adamuon in by_rule[1]] == [4 * muon.state for muon in by_rule[0]]


@pytest.mark.parametrize("mesh", [None, 8, (8,), (0, 8), (2, -4), (2, 4, 1), "2x4"])
@pytest.mark.parametrize("strategy", ["load_balance", "milp"])
def test_a_mesh_is_two_positive_numbers(mesh, strategy):
    with pytest.raises(ValueError, match=r"plan: mesh: expected \(nodes, GPUs a node\) .*got"):
        dmuon.plan(make_model(), mesh, strategy=strategy)


def test_where_scipy_finds_nothing_in_time_load_balance_decides_which_is_said(monkeypatch, caplog):
    timed_out = SimpleNamespace(x=None, status=1, message="Time limit reached.")
    monkeypatch.setattr(scipy.optimize, "milp", lambda *_, **__: timed_out)
    with caplog.at_level(logging.WARNING, "dmuon"):
        plan = dmuon.plan(make_model(), (2, 4), strategy="milp")
    assert plan.to_json() == dmuon.plan(make_model(), (2, 4)).to_json()
    assert "Time limit reached" in caplog.text and "load_balance decides" in caplog.text


def test_without_scipy_milp_still_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ValueError, match="expected SciPy"):
        dmuon.plan(make_model(), (2, 4), strategy="milp")


def table(*entries):
    shapes = ", ".join(
        f'{{"rows": 8, "cols": 4, "tensor_parallel": {over}, "batches": [{{"size": 1, "ns": {ns}}}, '
        f'{{"size": 2, "ns": {pair}}}]}}'
        for over, ns, pair in entries
    )
    return _plan.CostTable.from_json(f'{{"schema_version": 1, "source": "a test", "shapes": [{shapes}]}}')


def test_milp_takes_no_times_over_tensor_parallelism():
    """By which one owner had better take both matrices."""
    items = [_plan.Parameter(str(i), 8, 4, i) for i in range(2)]
    times = table(("false", 10, 20), ("true", 40, 10))
    plan = milp.make_plan(items, _plan.Mesh(1, 2), times, _plan.PlanOptions())
    assert (plan.strategy, sorted(plan.loads_ns)) == ("milp", [10, 10])
    with pytest.raises(ValueError, match="expected an entry for shape 8 x 4; got none"):
        milp.make_plan(items, _plan.Mesh(1, 2), table(("true", 10, 10)), _plan.PlanOptions())


def test_milp_leaves_what_single_columns_have_to_their_ranks():
    """By hand: 6 matrices of 10 ns, and 4 of 2 blocks for each of two columns; 220 ns on 4 owners, in tens."""
    stack = {"num_matrices": 4, "column_blocks": 2, "transposed": True}
    items = [_plan.Parameter(str(i), 8, 4, i) for i in range(6)]
    items += [_plan.Parameter("s[0:4]", 8, 8, 6, column=0, **stack)]
    items += [_plan.Parameter("s[4:8]", 8, 8, 6, column=1, continues=True, **stack)]
    mesh = _plan.Mesh(2, 2)
    divided = _plan.divide(items, mesh, smallest_part=1)
    assert len(divided) == 14 and all(item.column_blocks == 2 for item in divided[6:])
    times = _plan.CostTable("a test", [((1, 8, 4), [(1, 10), (2, 20)]), ((2, 8, 4), [(1, 20)])])
    plan = milp.make_plan(divided, mesh, times, _plan.PlanOptions())
    assert (plan.strategy, sum(plan.loads_ns), plan.makespan_ns) == ("milp", 220, 60)
    assert [owner % 2 for owner in plan.owner[6:]] == [0] * 4 + [1] * 4
    assert max(map(plan.owner[:6].count, range(4))) == 2
