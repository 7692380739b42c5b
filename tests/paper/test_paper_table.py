"""The paper's table of step times: what its own rows say."""

from __future__ import annotations

import statistics

import pytest
from dmuon._paper.table import ABLATION, ROWS, WALL_WM, misprints, row_of


def test_there_are_six_rows_of_each_of_four_models():
    models = {row.model for row in ROWS}
    assert [(row.model, row.gpus) for row in ROWS] == [
        (model, 8 << k) for model in dict.fromkeys(row.model for row in ROWS) for k in range(6)
    ]
    assert len(models) == 4


def test_a_step_contains_its_optimizer_and_vanilla_is_slower():
    for row in ROWS:
        assert row.dmuon_optim < row.dmuon_step < row.vanilla_step
        assert row.dmuon_optim < row.vanilla_optim < row.vanilla_step
        assert row.adamw_step < row.dmuon_step


def test_the_rows_give_other_means_than_the_headlines():
    assert statistics.mean(row.overhead for row in ROWS) == pytest.approx(3.28, abs=0.005)  # "within +2 %"
    assert statistics.median(row.overhead for row in ROWS) == pytest.approx(2.14, abs=0.005)
    assert statistics.mean(row.step_speedup for row in ROWS) == pytest.approx(2.05, abs=0.005)  # "3.1 x"
    assert min(row.optim_speedup for row in ROWS) == pytest.approx(7.85, abs=0.005)  # "6.85 x"
    assert max(row.optim_speedup for row in ROWS) == pytest.approx(163.8, abs=0.05)
    assert sum(ABLATION.values()) == 96


def test_eleven_printed_quotients_are_not_those_of_the_rows():
    """All six optimizer speedups of Wall-WM are printed one too low."""
    assert len(misprints()) == 11
    wrong = [one for one in misprints() if one.startswith(WALL_WM) and "optimizer speedup" in one]
    assert len(wrong) == 6
    for gpus in (8, 16, 32, 64, 128, 256):
        row = row_of(WALL_WM, gpus)
        assert row.optim_speedup - row.printed_optim_speedup == pytest.approx(1, abs=0.01)
