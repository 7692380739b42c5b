"""A schedule is what will run: what a profile then sees, and the bytes that each rank then sends."""

from __future__ import annotations

import collections

import pytest
from profiled import MESHES, Trained, record, spans_of
from training import AHEAD

import dmuon


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("node_copy", [True, False])
def test_a_replayed_step_does_what_its_schedule_says_once(ranks, mesh, node_copy):
    results = ranks.run(record, mesh, schedule={**AHEAD, "node_copy": node_copy})
    for rank, result in enumerate(results):
        schedule = result["schedule"]
        planned = collections.Counter(
            (o.kind, o.unit)
            for operations in schedule.passes.values()
            for o in operations
            if o.lane != "compute" and not o.idle
        )
        seen = collections.Counter(
            (kind, unit) for _, lane, kind, unit, *_ in spans_of(results[0], rank) if lane != "compute"
        )
        assert seen == planned
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
        for lane in ("intra", "inter"):
            planned = sum(
                schedule.sent_bytes(operation)
                for operations in schedule.passes.values()
                for operation in operations
                if operation.lane == lane
            )
            assert planned == result["spent"][f"bytes_sent_{lane}"], lane
        for unit in result["units"]:
            assert unit in result["table"]


def test_a_missing_matplotlib_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    schedule = dmuon.schedule(Trained(None).model)
    with pytest.raises(ImportError, match=r"schedule.save_picture.*dmuon\[examples\]"):
        schedule.save_picture(tmp_path / "no.png")
