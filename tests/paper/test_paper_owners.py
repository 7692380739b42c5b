"""Owners and components by the profile: known answers, and agreement with dmuon's plans."""

from __future__ import annotations

import pytest
from dmuon._paper.ablation import SYMMETRIC, TUNING, ablate
from dmuon._paper.answer import answer, close_by_strategy
from dmuon._paper.owners import DEALT, LOAD_BALANCE, RANK0, ROUND_ROBIN, XOR_LAYOUT, cost_table, deal, in_turn
from dmuon._paper.profile import PAPER, full_orthogonalisation_ms, orthogonalisation_ms
from dmuon._paper.table import ROWS, row_of
from dmuon._paper.workload import WORKLOADS, Shape

from dmuon import _plan


@pytest.fixture(scope="module")
def found():
    return answer()


def test_matrices_are_dealt_from_the_costliest():
    assert deal([1, 5, 2, 4, 3], 2) == [5 + 3 + 1, 4 + 2]
    assert in_turn([1, 5, 2, 4, 3], 2) == [1 + 2 + 3, 5 + 4]
    assert deal([1], 3) == [1, 0, 0]


def test_inventories_have_the_published_numbers_of_matrices():
    found = {name: (len(one.shapes()), sum(s.millions for s in one.shapes())) for name, one in WORKLOADS.items()}
    assert {name: number for name, (number, _) in found.items()} == {
        "Wall-OSS": 417,
        "Pi0": 252,
        "Qwen2.5-7B": 196,
        "Wall-WM": 605,
    }
    assert found["Qwen2.5-7B"][1] == pytest.approx(6525.3, abs=0.1)


@pytest.mark.parametrize("model, gpus", [("Wall-OSS", 16), ("Qwen2.5-7B", 128)])
def test_round_robin_and_one_owner_are_dmuons(found, model, gpus):
    inventory, shapes = _plan.model(WORKLOADS[model].catalogue_name).inventory, WORKLOADS[model].shapes()
    owners = next(one for one in found.owners if one.row == row_of(model, gpus))
    for name in (ROUND_ROBIN, RANK0):
        costs = cost_table(PAPER, inventory, shapes)
        plan = _plan.make_plan(inventory, _plan.Mesh(gpus // 8, 8), name, costs, _plan.PlanOptions())
        assert owners.optim_ms[name] == pytest.approx(plan.makespan_ns / 1e6 + PAPER.fixed_ms, abs=1e-3)


def test_no_strategy_beats_the_bound_and_dmuons_beats_the_others(found):
    assert [one.row for one in found.owners] == ROWS
    for one in found.owners:
        assert min(one.optim_ms.values()) >= one.bound_ms - 1e-3
        assert one.optim_ms[LOAD_BALANCE] == pytest.approx(min(one.optim_ms.values()), rel=1e-6)
        assert one.optim_ms[LOAD_BALANCE] <= 1.02 * one.bound_ms
        assert one.optim_ms[XOR_LAYOUT] == pytest.approx(one.optim_ms[ROUND_ROBIN], abs=1e-3)
        assert one.optim_ms[RANK0] == max(one.optim_ms.values())


def test_dealt_owners_explain_the_table_best(found):
    close = close_by_strategy(found.owners)
    assert max(close, key=lambda name: close[name]) == DEALT
    assert close[RANK0] == 0


def test_full_products_take_the_cheaper_form():
    square, wide = Shape(1000, 1000), Shape(1000, 4000)
    assert full_orthogonalisation_ms(PAPER, square) == pytest.approx(30e9 / 195e9)  # direct: 20 + 10
    assert full_orthogonalisation_ms(PAPER, wide) == pytest.approx((8 * 4e9 + 28e9) / 195e9)
    assert orthogonalisation_ms(PAPER, wide) == pytest.approx((2 * 4e9 + 14e9) / 217e9 + 4 * 4e9 / 195e9)


def test_shares_of_the_breakdown_add_up_and_are_not_the_papers():
    made = ablate()
    assert sum(one.share for one in made.path) == pytest.approx(100)
    assert made.path[-1].optim_ms == made.dmuon_ms
    three = [one for one in made.without if one.share_of_three is not None]
    assert sum(one.share_of_three for one in three) == pytest.approx(100)
    assert [one.component for one in made.without if one.optim_ms is None] == [TUNING]
    symmetric = [one for one in [*made.without, *made.path] if one.component == SYMMETRIC]
    assert all(abs(one.share - 48) > 20 for one in symmetric)
