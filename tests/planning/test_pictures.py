"""The picture of a plan, by what matplotlib was told to draw."""

from __future__ import annotations

import itertools
import sys
from xml.etree import ElementTree

import pytest
from dmuon._planning import pictures

import dmuon
from dmuon import _plan


def plan_of(num_matrices, mesh, strategy="load_balance", num_shapes=2, name="layers.{}"):
    items = [
        _plan.Parameter(name.format(w), 256 + 64 * (w % num_shapes), 128, w // 4, mesh.tensor_parallel > 1)
        for w in range(num_matrices)
    ]
    costs = _plan.modelled_costs(items, "a800-sxm4-80gb", mesh.tensor_parallel)
    return _plan.make_plan(items, mesh, strategy, costs, _plan.PlanOptions())


@pytest.mark.parametrize("sides", [(1, 1), (1, 8), (4, 8), (32, 8), (3, 70), (2, 4, 2)], ids=str)
@pytest.mark.parametrize("strategy", ["load_balance", "rank0", "round_robin"])
def test_stacks_end_at_the_loads_and_the_line_is_at_the_bound(sides, strategy):
    plan = plan_of(30, _plan.Mesh(*sides), strategy, num_shapes=3)
    times, _, *_ = pictures.draw(plan, "a plan", "test").axes
    stacks = [patch.get_data() for patch in times.patches]
    assert len(stacks) == 3
    for below, above in itertools.pairwise(stacks):
        assert list(above.baseline) == list(below.values)
    assert list(stacks[0].baseline) == [0.0] * len(plan.loads_ns)
    assert list(stacks[-1].values) == pytest.approx([ns / 1e6 for ns in plan.loads_ns])
    (bound,) = [line for line in times.lines if line.get_label() == "bound"]
    assert bound.get_ydata()[0] == pytest.approx(plan.bound_ns / 1e6)


def test_every_shape_has_its_time_and_the_number_of_its_parameters():
    items = [_plan.Parameter("a", 4, 4, 0), _plan.Parameter("b", 4, 4, 0), _plan.Parameter("c", 8, 4, 1)]
    costs = _plan.CostTable("by hand", [((1, 4, 4), [(1, 3_000_000), (2, 4_500_000)]), ((1, 8, 4), [(1, 7_000_000)])])
    plan = _plan.make_plan(items, _plan.Mesh(1, 2), "rank0", costs, _plan.PlanOptions())
    assert pictures.times_by_shape(plan) == {"8 x 4 (1)": [7.0, 0.0], "4 x 4 (2)": [4.5, 0.0]}


def test_the_shortest_of_many_shapes_share_a_colour():
    plan = plan_of(60, _plan.Mesh(1, 4), num_shapes=20)
    layers = pictures.times_by_shape(plan)
    assert len(layers) == 10 and list(layers)[-1] == "11 other shapes (33)"
    assert [sum(column) for column in zip(*layers.values(), strict=True)] == pytest.approx(
        [ns / 1e6 for ns in plan.loads_ns]
    )


def test_the_map_has_all_weights_in_the_column_of_their_owner():
    plan = plan_of(30, _plan.Mesh(2, 4))
    weights = pictures.weights_by_column(plan)
    assert len(weights) == 4 and len(weights[0]) == 8
    expected = [[0.0] * 8 for _ in range(4)]
    for w, owner in enumerate(plan.owner):
        expected[owner % 4][w // 4] += (256 + 64 * (w % 2)) * 128 * 2 / 1e6
    for row, other in zip(weights, expected, strict=True):
        assert row == pytest.approx(other)
    _, columns, *_ = pictures.draw(plan, "", "test").axes
    assert columns.images[0].get_array().tolist() == weights


def test_what_a_title_holds_is_text(tmp_path):
    title = "</svg><script>&\"' $x$ $"
    dmuon.Plan(plan_of(4, _plan.Mesh(1, 2))).save_picture(tmp_path / "plan.svg", title)
    ElementTree.parse(tmp_path / "plan.svg")  # it is well formed
    (heading, _, costs) = pictures.draw(plan_of(4, _plan.Mesh(1, 2)), title, "test").get_suptitle().split("\n")
    assert heading == title and costs == "costs: model of a800-sxm4-80gb, after dmuon tune"


def test_a_plan_without_matrices_or_times_is_drawn(tmp_path):
    for items in ([], [_plan.Parameter("a", 4, 4, 0)]):
        free = _plan.CostTable("free", [((1, 4, 4), [(1, 0)])])
        for mesh in (_plan.Mesh(2, 4), _plan.Mesh(1, 1)):
            plan = _plan.make_plan(items, mesh, "lpt", free, _plan.PlanOptions())
            dmuon.Plan(plan).save_picture(tmp_path / "plan.png")
            assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_format_that_matplotlib_does_not_write_is_refused_by_name(tmp_path):
    plan = dmuon.Plan(plan_of(4, _plan.Mesh(1, 2)))
    for name in ("plan.bmp2", "plan"):
        with pytest.raises(ValueError, match=rf"^Plan.save_picture: expected .*\.svg.*; got '.*/{name}'$"):
            plan.save_picture(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^Plan.save_picture: expected matplotlib.*pip install 'dmuon\[examples\]'"):
        dmuon.Plan(plan_of(4, _plan.Mesh(1, 2))).save_picture(tmp_path / "plan.svg")
