"""A plan as a table."""

from __future__ import annotations

import json

from dmuon._planning.table import table

import dmuon
from dmuon import _plan

# Of 192 MiB of state a matrix, spread over the two ranks of its slot.
SIDES = {"rows": 4096, "cols": 4096, "tensor_parallel": True}


def by_hand() -> _plan.Plan:
    """Owner 3 has two matrices in one batch, owner 0 has one; the bound is that of matrix c alone... of one owner."""
    items = [_plan.Parameter(name, 4096, 4096, unit, True) for name, unit in (("a", 0), ("b", 0), ("c", 1))]
    times = [{"size": 1, "ns": 1_000_000}, {"size": 2, "ns": 1_800_000}]
    costs = _plan.CostTable.from_json(
        json.dumps({"schema_version": 1, "source": "by hand", "shapes": [SIDES | {"batches": times}]})
    )
    options = _plan.PlanOptions()
    options.node_copy = False
    counts = [[2], [1], [0], [0]]
    return _plan.make_plan_from_counts(items, _plan.Mesh(2, 1, 2), "by hand", counts, costs, options)


def test_the_slowest_owner_comes_first_then_bound_gap_and_spread():
    plan = by_hand()
    lines = table(plan, 16).splitlines()
    assert lines[:3] == [
        "strategy by hand, mesh 2 x 1, tensor parallel 2, 3 parameters in 2 batches",
        "costs: by hand",
        " owner  node  column  parameters  batches  state MiB  total MiB  predicted ms",
    ]
    rows = [line.split() for line in lines[3:7]]
    assert [row[7] for row in rows] == ["1.800", "1.000", "0.000", "0.000"]
    assert [row[3:5] for row in rows] == [["2", "1"], ["1", "1"], ["0", "0"], ["0", "0"]]
    # Ranks 0 and 1 are node 0, ranks 2 and 3 node 1; the state of a slot's matrices is spread over its ranks.
    assert all(row[1:3] == [str(int(row[0]) // 2), "0"] for row in rows)
    on_node = {int(row[1]): 0 for row in rows}
    for row in rows:
        on_node[int(row[1])] += int(row[3])
    assert all(float(row[5]) == 96.0 * on_node[int(row[1])] for row in rows)
    assert [float(row[6]) for row in rows] == [round(plan.memory_bytes[int(row[0])] / 2**20, 2) for row in rows]
    bound = plan.bound_ns / 1e6
    assert lines[7] == f"makespan 1.800 ms, no plan is below {bound:.3f} ms, gap {(1.8 / bound - 1) * 100:.2f} %"
    assert lines[8] == "window of 2 units: 1.00 of 1 columns, 2.00 repeats, busiest column 1.00 x the mean"
    assert lines[9] == "weights of a column: 96.00 to 96.00 MiB"
    assert len(lines) == 16


def test_units_show_what_travels_between_nodes_the_least_even_first():
    """Of 32 MiB a matrix. One node owns all that it can: its bytes go one way, the other node's the other way."""
    plan = by_hand()
    lines = table(plan, 16).splitlines()[10:]
    owned = [[0, 0], [0, 0]]  # [unit][node]
    for item, owner in zip(plan.inventory, plan.owner, strict=True):
        owned[item.unit][plan.mesh.replicate_of(owner)] += 32
    most = [max(nodes) for nodes in owned]
    assert lines[0] == (
        f"units: busiest node {sum(most) / 96 * 2:.2f} x the mean, at worst 2.00 x; busiest column 1.00 x"
    )
    rows = [[float(word) for word in line.split()] for line in lines[3:5]]
    assert rows[0][0] == max((0, 1), key=lambda unit: 2 * most[unit] - sum(owned[unit]))
    for unit, weights, *nodes, column in rows:
        busiest, idlest = max(owned[int(unit)]), min(owned[int(unit)])
        assert (weights, column) == (busiest + idlest, 1.0)
        assert nodes == [busiest, idlest, idlest, busiest]
    assert lines[5] == "the figures are of weights; gradients travel the other way"
    assert "... and 1 units" in table(plan, 1)


def test_units_are_not_shown_for_one_node():
    items = [_plan.Parameter("a", 4, 4, 0)]
    costs = _plan.modelled_costs(items, "cpu")
    text = table(_plan.make_plan(items, _plan.Mesh(1, 2), "rank0", costs, _plan.PlanOptions()), 16)
    assert "unit" not in text.replace("window of 2 units", "")


def test_a_bandwidth_adds_the_time_on_the_wire():
    """Weights take 2 bytes an element and go twice a step without node copies, gradients 4. 1 MiB/s: a second a MiB."""
    plan = by_hand()
    most = sum(unit.most_of_node for unit in plan.spread.units) / 2**20
    line = table(plan, 16, 2**20).splitlines()[-1]
    assert line == (
        f"between nodes at {2**23 / 1e9:g} Gbit/s each way: weights {most * 2e3:.3f} ms and gradients "
        f"{most * 2e3:.3f} ms a step, together at least {4 * 48e3:.3f} ms"
    )


def test_at_most_max_rows_owners_are_shown():
    text = table(by_hand(), 1)
    assert "... and 3 faster owners" in text and len(text.splitlines()) == 14
    assert "... and 4 faster owners" in table(by_hand(), -1)
    assert "..." not in table(by_hand(), 4)


def test_there_is_no_gap_without_work():
    empty = _plan.make_plan([], _plan.Mesh(1, 1), "load_balance", _plan.CostTable("", []), _plan.PlanOptions())
    assert "gap" not in table(empty, 16)


def test_a_plan_prints_as_its_table():
    assert str(dmuon.Plan(by_hand())) == dmuon.Plan(by_hand()).table() == table(by_hand(), 16)
