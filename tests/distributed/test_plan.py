"""Plans as training uses them: measured, kept, saved, loaded, limited; and refused."""

from __future__ import annotations

import json
import random
import sys

import plan_cases as cases
import pytest
import trajectory_cases
from dmuon._planning import milp
from models import make_gpt
from test_trajectory import FEW, LR, expect_reference, reference  # noqa: F401  (a fixture)

import dmuon
from dmuon import _plan

SHAPES = {(72, 24): 900, (24, 24): 500, (41, 24): 700, (24, 41): 800}


def test_costs_are_measured_once_and_kept(ranks, tmp_path):
    for first, both, before, after in ranks.run(cases.measured_calls, (2, 2), folder=str(tmp_path)):
        assert (first, both) == (1, 1)
        assert before == after
        table = json.loads(before)
        assert "4 ranks at once" in table["source"]
        assert {(s["rows"], s["cols"]) for s in table["shapes"]} == set(SHAPES)
        assert all(b["ns"] > 0 for s in table["shapes"] for b in s["batches"])
        assert all([b["size"] for b in s["batches"]] == [1, 2, 3] for s in table["shapes"])


def test_what_is_kept_may_be_damaged(ranks, tmp_path):
    ranks.run(cases.measured_calls, (2, 2), folder=str(tmp_path))
    (kept,) = (tmp_path / "costs").iterdir()
    kept.write_text(kept.read_text()[:-40])
    assert [first for first, *_ in ranks.run(cases.measured_calls, (2, 2), folder=str(tmp_path))] == [1] * 4


def test_a_batch_that_one_rank_cannot_run_is_scaled_on_all(ranks, tmp_path):
    tables = ranks.run(cases.measured_where_large_batches_fail, (2, 2), folder=str(tmp_path))
    assert tables == [tables[0]] * 4
    for shape in tables[0]["shapes"]:
        assert all(0 < batch["ns"] < 10**12 for batch in shape["batches"])
    assert tables[0]["source"].endswith("4 ranks at once; 8 batches scaled by the model")
    (kept,) = (tmp_path / "costs").iterdir()
    assert {size for *_, size, _ in json.loads(kept.read_text())["times"]} == {1}


def test_what_else_one_rank_raises_reaches_all_and_nobody_waits(ranks, tmp_path):
    messages = ranks.run(cases.error_where_one_rank_cannot_run, (2, 2), folder=str(tmp_path))
    assert messages[2] == "a fault, says the test"
    for message in messages[:2] + messages[3:]:
        assert "failed on rank 2: RuntimeError: a fault, says the test" in message
    assert not list(tmp_path.iterdir())


def test_measuring_leaves_random_numbers_alone(ranks, tmp_path):
    assert all(ranks.run(cases.random_state_is_left_alone, (2, 2), folder=str(tmp_path)))


@pytest.mark.parametrize("strategy", ["milp", "lpt", "xor_layout"])
def test_every_strategy_trains_to_the_same_weights(ranks, reference, strategy):  # noqa: F811
    options = {"strategy": strategy, "costs": "modelled"}
    expect_reference(reference, ranks.run(trajectory_cases.train, (2, 2), steps=FEW, lr=LR, dedicate=options))


def test_a_saved_plan_is_loaded_as_it_was(ranks, tmp_path):
    path = tmp_path / "plan.json"
    owners = ranks.run(cases.saved, (2, 2), path=str(path), strategy="round_robin")
    loaded = [json.loads(text) for text in ranks.run(cases.plan_json, (2, 2), plan=str(path))]
    assert all(plan == json.loads(path.read_text()) for plan in loaded)
    assert [a["owner"] for a in loaded[0]["assignments"]] == owners[0]
    assert dmuon.Plan.load(path).owner == owners[0]


def test_a_plan_for_something_else_is_refused_with_the_first_difference(ranks, tmp_path):
    path = str(tmp_path / "plan.json")
    ranks.run(cases.saved, (2, 2), path=path)
    for message in ranks.run(cases.error, (4,), plan=path):
        assert "mesh: expected 1 x 4 x 1, the plan is for 2 x 2 x 1" in message
    for message in ranks.run(cases.error, (2, 2), plan=path, depth=2):
        assert "expected 8 matrices; the plan has 12" in message
    for message in ranks.run(cases.error, (2, 2), plan=path, select=lambda_out_is_adamws):
        assert "matrix 1: expected 'blocks.0.up.weight', 41 x 24, unit 0; the plan has 'blocks.0.out.weight'" in message


def lambda_out_is_adamws(name, module, parameter):
    return False if "out" in name else None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plan": "/nowhere/plan.json"}, ["plan", "/nowhere/plan.json"]),
        ({"costs": "/nowhere/costs.json"}, ["costs", "/nowhere/costs.json"]),
        ({"strategy": "best"}, ["strategy", "load_balance", "milp", "'best'"]),
        ({"layout_slack": -0.1}, ["layout_slack", "-0.1"]),
        ({"max_memory_bytes": 0}, ["max_memory_bytes", "got 0"]),
        ({"costs": 3}, ["costs", "got 3"]),
    ],
    ids=str,
)
def test_bad_options_raise_on_every_rank(ranks, options, words):
    for message in ranks.run(cases.error, (2, 2), **options):
        assert all(word in message for word in words), message


def test_a_table_that_lacks_a_shape_is_named(ranks, tmp_path):
    path = tmp_path / "costs.json"
    cases.table_for(path, {shape: ns for shape, ns in SHAPES.items() if shape != (24, 41)})
    for message in ranks.run(cases.error, (2, 2), costs=str(path)):
        assert "24 x 41" in message
    cases.table_for(path, SHAPES)
    plan = json.loads(ranks.run(cases.plan_json, (2, 2), costs=str(path))[0])
    assert plan["costs"]["source"] == "a test"
    assert sum(plan["loads_ms"]) == pytest.approx(3 * sum(SHAPES.values()) / 1e6)


def test_a_memory_limit_is_kept_or_one_that_would_do_is_named(ranks):
    (message, *others) = ranks.run(cases.error, (2, 2), max_memory_bytes=1000, costs="modelled")
    assert others == [message] * 3
    enough = int(message.split(">= ")[1].split()[0])
    plan = json.loads(ranks.run(cases.plan_json, (2, 2), max_memory_bytes=enough, costs="modelled")[0])
    assert max(plan["memory_bytes"]) <= enough


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
    items = [_plan.Matrix(f"{shape}.{i}", *shape, i) for shape, (number, _) in shapes.items() for i in range(number)]
    table = _plan.CostTable("a test", [(shape, times) for shape, (_, times) in shapes.items()])
    mesh, options = _plan.Mesh(1, num_owners), _plan.PlanOptions()
    best = _plan.make_plan_from_counts(items, mesh, "milp", counts, table, options)
    ours = _plan.make_plan(items, mesh, "load_balance", table, options)
    assert ours.makespan_ns <= 1.01 * best.makespan_ns
    assert ours.bound_ns <= best.makespan_ns


def test_the_milp_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ValueError, match=r"pip install 'dmuon\[milp\]'"):
        milp.solve([(2, [(1, 5)])], 2)


def test_beyond_its_threshold_the_milp_leaves_it_to_load_balance_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(milp, "MOST_VARIABLES", 3)
    plan = dmuon.plan(make_gpt(), (2, 4), strategy="milp")
    assert plan.strategy == "load_balance"
    assert "load_balance decides" in caplog.text


def test_any_model_can_be_planned():
    model = make_gpt()
    plan = dmuon.plan(model, (2, 4), device="a800-sxm4-80gb")
    assert len(plan.owner) == 12 and len(plan.loads_ms) == 8
    assert plan.bound_ms <= plan.makespan_ms == max(plan.loads_ms)
    with pytest.raises(ValueError, match="mesh"):
        dmuon.plan(model)
    with pytest.raises(ValueError, match="a800-sxm4-80gb"):
        dmuon.plan(model, (2, 4), device="abacus")
