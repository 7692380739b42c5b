"""A schedule is what will run: what a profile then sees, and the bytes that each rank then sends."""

from __future__ import annotations

import collections
import itertools

import pytest
import torch
from accounting import bytes_of_norms
from mixture import make_mixture, select
from profiled import MESHES, Trained, record, spans_of
from training import AHEAD, dedicate, shard

import dmuon


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("node_copy", [True, False])
def test_a_replayed_step_does_what_its_schedule_says_in_its_order_once(ranks, mesh, node_copy):
    results = ranks.run(record, mesh, schedule={**AHEAD, "node_copy": node_copy})
    for rank, result in enumerate(results):
        schedule = result["schedule"]
        issued = [o for operations in schedule.passes.values() for o in operations]
        spans = sorted(spans_of(results[0], rank), key=lambda span: span[4])
        for lane in ("intra", "inter", "update"):
            planned = [(o.kind, o.unit) for o in issued if o.lane == lane]
            assert [(kind, unit) for _, on, kind, unit, *_ in spans if on == lane] == planned
        seen = collections.Counter((o.kind, o.unit) for o in issued if o.lane in ("intra", "inter"))
        once = {
            count for (kind, _), count in seen.items() if kind != "publish intra" and (node_copy or "route" in kind)
        }
        assert once == {1}


@pytest.mark.parametrize("mesh", [*MESHES, (4, 1)])
@pytest.mark.parametrize(("node_copy", "lookahead"), [(True, 2), (True, 0), (False, 2), (False, 1)])
def test_the_schedule_knows_what_each_rank_sends(ranks, mesh, node_copy, lookahead):
    options = {**AHEAD, "node_copy": node_copy, "lookahead": lookahead}
    for result in ranks.run(record, mesh, schedule=options):
        schedule = result["schedule"]
        for lane, num_members in (("intra", mesh[-1]), ("inter", 4 // mesh[-1])):
            planned = bytes_of_norms(len(result["units"]) * 4, 4, num_members) + sum(
                schedule.sent_bytes(operation)
                for operations in schedule.passes.values()
                for operation in operations
                if operation.lane == lane
            )
            assert planned == result["spent"][f"bytes_sent_{lane}"], lane
        for unit in result["units"]:
            assert unit in result["table"]


def printed_with_stacks(mesh):
    model = make_mixture()
    dedicate(model, mesh, AHEAD, select=select, strategy="round_robin")
    shard(model, mesh)
    optimizer = dmuon.Muon(model, lr=0.1)
    model(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    return [dmuon.routing_table(model), str(dmuon.schedule(model))]


def test_the_schedule_knows_the_units_of_stacks_that_have_several_owners(ranks):
    for table, printed in ranks.run(printed_with_stacks, (2, 2)):
        (owners,) = (row.owner for row in table if row.name == "blocks.0.experts.gate_up")
        assert len(owners) == 4
        for unit in {row.unit for row in table if row.algorithm == "muon"}:
            assert f"{unit or '(root)'} " in printed


def test_a_missing_matplotlib_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    schedule = dmuon.schedule(Trained(None).model)
    with pytest.raises(ImportError, match=r"schedule.save_picture.*dmuon\[examples\]"):
        schedule.save_picture(tmp_path / "no.png")


def test_a_copy_from_another_process_is_printed_but_not_drawn(ranks, tmp_path):
    schedule = ranks.run(record, (2, 2), schedule=AHEAD)[0]["schedule"]
    assert "publish inter" in str(schedule)
    with pytest.raises(ValueError, match="got a copy from another process"):
        schedule.save_picture(tmp_path / "no.png")


def test_the_picture_shows_each_unit_once_and_a_lane_does_one_thing_at_a_time():
    trained = Trained(None)
    schedule = dmuon.schedule(trained.model)
    panel = schedule._simulated.panel(schedule, intra=0.8, inter=0.8)
    names = [name for name, *_ in panel.phases]
    assert names == ["forward", "backward", "step"]
    computes = [bar for bar in panel.bars if bar.kind in ("forward", "backward")]
    units = len({bar.unit for bar in computes})
    assert [bar.end - bar.begin for bar in computes] == [1.0] * units + [2.0] * units
    for lane in ("compute", "update", "intra"):
        bars = sorted((bar.begin, bar.end) for bar in panel.bars if bar.lane == lane)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(bars))
