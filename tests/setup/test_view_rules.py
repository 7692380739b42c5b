"""Which matrices a parameter consists of: the ready views, what select() may say, and the rule for experts."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from dmuon._setup.routing import route

import dmuon
from dmuon import View, _plan, views


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 6, 8))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 6))
        self.scales = nn.Parameter(torch.zeros(4, 1, 8))
        self.stacked_bias = nn.Parameter(torch.zeros(4, 2, 8))
        self.slot_embeds = nn.Parameter(torch.zeros(4, 2, 8))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.tables = nn.Parameter(torch.zeros(2, 6, 8))  # in no module of experts
        self.proj = nn.Linear(8, 6)
        self.expert = nn.Conv1d(8, 6, 3)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 8))


def routed(model: nn.Module, select=None) -> dict[str, tuple[str | View, ...]]:
    return {row.name: (row.algorithm, *row.views) for row in route(model, select)[1]}


@pytest.mark.parametrize(
    ("view", "sizes"),
    [
        (views.matrix(torch.zeros(4, 6)), (1, 4, 6)),
        (views.experts(torch.zeros(5, 4, 6)), (5, 4, 6)),
        (views.gate_up(torch.zeros(4, 6)), (2, 2, 6)),
        (views.gate_up(torch.zeros(5, 4, 6)), (10, 2, 6)),
        (views.per_head(torch.zeros(12, 6), 4), (3, 4, 6)),
        (views.conv(torch.zeros(8, 4, 3, 3)), (1, 8, 36)),
        (views.conv(torch.zeros(8, 4, 3, 3), groups=2), (2, 4, 36)),
        (views.columns(torch.zeros(4, 6), 3), (1, 4, 6)),
        (views.columns(torch.zeros(5, 4, 6), 2), (5, 4, 6)),
        (views.transposed(views.experts(torch.zeros(5, 4, 6))), (5, 4, 6)),
        (views.interleaved(torch.zeros(12, 6), [2, 1]), (1, 12, 6)),
        (views.interleaved(torch.zeros(12, 6), [2, 1], by_group=True), (4, 3, 6)),
        (views.interleaved(torch.zeros(12, 6), [2, 2], by_group=True), (6, 2, 6)),
        (views.interleaved(torch.zeros(12, 6), [3]), (1, 12, 6)),
        (views.interleaved(torch.zeros(12, 6), (3,), by_group=True), (4, 3, 6)),
        (views.interleaved(torch.zeros(5, 12, 6), [2, 1]), (5, 12, 6)),
        (views.interleaved(torch.zeros(5, 12, 6), [2, 1], by_group=True), (20, 3, 6)),
        (views.interleaved(torch.zeros(5, 12, 6), [2, 2], by_group=True), (30, 2, 6)),
        (views.interleaved(torch.zeros(5, 12, 6), [3]), (5, 12, 6)),
    ],
)
def test_ready_views_have_these_sizes(view, sizes):
    assert view.sizes == sizes


@pytest.mark.parametrize(
    ("view", "sides", "words"),
    [
        (View(1, 4, 6), (4, 6), "4 x 6"),
        (View(5, 4, 6), (4, 6), "5 of 4 x 6"),
        (views.columns(torch.zeros(4, 6), 3), (4, 2), "4 x 3*2"),
        (views.transposed(views.columns(torch.zeros(5, 4, 6), 2)), (4, 3), "5 of 4 x 2*3 transposed"),
        (views.conv1d(torch.zeros(4, 6)), (4, 6), "4 x 6 transposed"),
        (views.interleaved(torch.zeros(12, 6), [2, 1]), (4, 6), "4*(2 + 1) x 6"),
        (views.interleaved(torch.zeros(12, 6), [2, 1], by_group=True), (1, 6), "4 of (2 + 1) x 6"),
        (views.interleaved(torch.zeros(12, 6), [4, 4, 4]), (4, 6), "(4 + 4 + 4) x 6"),
    ],
)
def test_a_view_says_which_matrices_it_has(view, sides, words):
    assert (view.sides, str(view)) == (sides, words)
    layout = {"column_blocks": view.column_blocks, "transposed": view.transposed, "heights": list(view.heights)}
    item = _plan.Parameter("w", view.rows, view.cols, 0, num_matrices=view.count, **layout)
    assert item.shape_text() == words


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (views.qkv(torch.zeros(12, 6)), [(3, 4, 6)]),
        (views.qkv(torch.zeros(12, 6), 2, 2), [(3, 4, 6)]),
        (views.qkv(torch.zeros(20, 6), 3, 1), [(1, 12, 6), (2, 4, 6)]),
        (views.rows(torch.zeros(12, 6), [5, 1, 1, 5]), [(1, 5, 6), (2, 1, 6), (1, 5, 6)]),
    ],
)
def test_views_of_blocks_of_rows_have_these_sizes(answer, expected):
    assert [view.sizes for view in answer] == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: View(0, 2, 3), r"View: count: expected an integer in \[1, 2\*\*31\), got 0"),
        (lambda: View(1, 2.0, 3), "View: rows: expected an integer"),
        (lambda: views.experts(torch.zeros(4, 6)), r"views.experts: parameter: expected \[experts, rows, cols\], got"),
        (lambda: views.gate_up(torch.zeros(5, 6)), r"a multiple of 2, got \(5, 6\)"),
        (lambda: views.per_head(torch.zeros(12, 6), 5), "views.per_head: head_dim: expected a divisor of the 12 rows"),
        (lambda: views.qkv(torch.zeros(16, 6)), r"num_heads, num_kv_heads: expected .* the 16 rows, got 1 \+ 2 \* 1"),
        (lambda: views.rows(torch.zeros(16, 6), 16), r"views.rows: heights: expected positive integers .*, got 16"),
        (lambda: views.conv(torch.zeros(8, 4)), r"views.conv: parameter: expected \[out, in / groups, ...\]"),
        (lambda: views.matrix(3), "got int"),
        (lambda: View(1, 4, 6, column_blocks=4), "View: column_blocks: expected a divisor of the 6 cols, got 4"),
        (lambda: View(1, 4, 6, column_blocks=True), "View: column_blocks: expected an integer"),
        (lambda: View(1, 4, 6, transposed=1), "View: transposed: expected True or False, got 1"),
        (lambda: views.columns(torch.zeros(4, 6), 4), "views.columns: num_blocks: expected a divisor of the 6 columns"),
        (lambda: views.columns(torch.zeros(4, 6), 3.0), "views.columns: num_blocks: .* got 3.0"),
        (lambda: views.columns(torch.zeros(6), 3), r"views.columns: parameter: expected \[rows, cols\] or"),
        (lambda: View(1, 12, 6, heights=(12,)), r"View: heights: expected \(\) or a tuple of several"),
        (lambda: View(1, 12, 6, heights=[2, 1]), "View: heights: expected .* got .2, 1."),
        (lambda: View(1, 12, 6, heights=(2, 0)), "View: heights: expected .* positive"),
        (lambda: View(1, 12, 6, heights=(3, 2)), r"View: heights: expected a sum that divides the 12 rows, got \(3, 2"),
        (lambda: View(1, 12, 6, transposed=True, heights=(2, 1)), r"heights: expected \(\) beside column_blocks or"),
        (lambda: View(1, 12, 6, column_blocks=2, heights=(2, 1)), r"heights: expected \(\) beside column_blocks or"),
        (lambda: views.interleaved(torch.zeros(12, 6), [3, 2]), "views.interleaved: heights: expected .* the 12 rows"),
        (lambda: views.interleaved(torch.zeros(12, 6), []), "views.interleaved: heights: expected positive integers"),
        (lambda: views.interleaved(torch.zeros(12, 6), 3), "views.interleaved: heights: .* got 3"),
        (lambda: views.interleaved(torch.zeros(2, 2, 12, 6), [2, 1]), "views.interleaved: parameter: expected"),
        (lambda: views.conv(torch.zeros(8, 4, 3), 3), "views.conv: groups: expected a divisor of the 8 rows, got 3"),
        (lambda: views.transposed(torch.zeros(4, 6)), "views.transposed: view: expected a dmuon.View"),
    ],
)
def test_what_is_no_such_parameter_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_matrices_of_a_view_are_these_rows_and_columns():
    stored = torch.arange(12)[:, None] * 100 + torch.arange(6)
    q, k = views.interleaved(stored, [2, 1]).matrices(stored)
    assert q.equal(stored[[0, 1, 3, 4, 6, 7, 9, 10]]) and k.equal(stored[[2, 5, 8, 11]])
    by_group = list(views.interleaved(stored, [2, 1], by_group=True).matrices(stored.view(-1)))
    stack = torch.stack([stored, -stored])
    gate, up, *others = views.interleaved(stack, [1, 1]).matrices(stack)
    assert gate.equal(stored[::2]) and up.equal(stored[1::2]) and [m.sum() for m in others] == [-gate.sum(), -up.sum()]
    assert len(by_group) == 8 and by_group[2].equal(stored[3:5]) and by_group[3].equal(stored[5:6])
    left, right = views.columns(stored, 2).matrices(stored)
    assert left.equal(stored[:, :3]) and right.equal(stored[:, 3:])
    assert [m.tolist() for m in views.per_head(stored, 4).matrices(stored)] == [r.tolist() for r in stored.split(4)]


def test_stacks_of_experts_are_muons_and_nothing_else_of_three_dimensions():
    found = routed(Block())
    assert found["experts.gate_up_proj"] == ("muon", View(4, 6, 8))
    assert found["experts.gate_up_proj_bias"] == ("adamw",)
    for name in ("experts.scales", "experts.stacked_bias", "experts.slot_embeds", "expert.weight"):
        assert found[name] == ("adamw",)
    assert found["tables"] == ("adamw",)
    assert found["proj.weight"] == ("muon", View(1, 6, 8))


def test_select_chooses_views():
    model = nn.ModuleDict({"proj": Flat()})
    model.register_parameter("tables", nn.Parameter(torch.zeros(2, 6, 8)))

    def by_name(name, module, parameter):
        return View(4, 3, 8) if name == "tables" else views.gate_up(parameter)

    assert routed(model, by_name) == {"tables": ("muon", View(4, 3, 8)), "proj.weight": ("muon", View(2, 3, 8))}
    table = str(route(model, by_name)[1])
    assert "Muon, 4 of 3 x 8" in table and "Muon, 2 of 3 x 8" in table
    assert table.endswith("Muon updates 100.0% of 144 trainable weights, AdamW the others")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            View(2, 6, 7),
            "all 96 elements of 'tables', or several .* rows are as long as its own, as its shape .2, 6, 8. has",
        ),
        (View(3, 2, 16), "whose rows are as long as its own"),
        (True, "or by a dmuon.View that says which matrices it consists of; got one of shape .2, 6, 8.: 3-D"),
        ((2, 6, 8), "all 96 elements of 'tables', or .*; got \\(2, 6, 8\\)"),
    ],
)
def test_a_view_that_does_not_fit_is_refused(answer, message):
    with pytest.raises(ValueError, match=message):
        dmuon.dedicate_params(Block(), select=lambda name, module, p: answer if name == "tables" else None)


def test_a_block_of_one_column_is_no_matrix_by_default(monkeypatch):
    monkeypatch.setitem(views.by_class, Flat, {"weight": lambda p: views.columns(p, 8)})
    (row,) = route(Flat(), None)[1]
    assert (row.algorithm, row.why) == ("adamw", "a side of 1")


def test_files_and_tables_say_how_matrices_lie_in_their_parameter():
    def blocks(name, module, parameter):
        return views.transposed(views.columns(parameter, 4))

    assert "Muon, 6 x 4*2 transposed" in str(route(Flat(), blocks)[1])
    (unit,) = dmuon.inventory(Flat(), select=blocks)["units"]
    assert unit["matrices"] == [{"name": "weight", "rows": 6, "cols": 8, "column_blocks": 4, "transposed": True}]


def test_an_inventory_says_how_many_matrices_a_parameter_has():
    (unit,) = (unit for unit in dmuon.inventory(Block())["units"] if unit["name"] == "experts")
    assert unit["matrices"] == [{"name": "gate_up_proj", "rows": 6, "cols": 8, "num_matrices": 4}]
