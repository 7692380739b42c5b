"""A profile shows what ran, and a schedule what will."""

from __future__ import annotations

import collections
import itertools
import math

import profile_cases as cases
import pytest
import torch
from profile_cases import Trained

WAITS = ("await weights", "reshard", "finish route")
MESHES = ((4,), (2, 2))
ENGINE = (*WAITS, "publish inter", "publish intra", "route intra", "route inter")


def spans_of(result, rank):
    return [span for span in result["spans"] if span[0] == rank]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_sees_the_spans_of_all(ranks, mesh):
    results = ranks.run(cases.record, mesh)
    assert {span[0] for span in results[0]["spans"]} == set(range(4))
    for result in results[1:]:
        assert result["spans"] == results[0]["spans"]
        assert result["summary"] == results[0]["summary"]
    for _, _, _, _, issued, started, done in results[0]["spans"]:
        assert issued <= started <= done


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("node_copy", [True, False])
def test_a_replayed_step_does_what_its_schedule_says_once(ranks, mesh, node_copy):
    results = ranks.run(cases.record, mesh, node_copy=node_copy)
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


@pytest.mark.parametrize("mesh", MESHES)
def test_a_lane_does_one_thing_at_a_time(ranks, mesh):
    result = ranks.run(cases.record, mesh, steps=3)[0]
    for rank, lane in itertools.product(range(4), ("intra", "inter")):
        times = sorted((span[5], span[6]) for span in spans_of(result, rank) if span[1] == lane)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
        assert bool(times) == (lane == "intra" or mesh == (2, 2))


def test_spans_add_up_to_the_counters(ranks):
    for result in ranks.run(cases.record, (2, 2), steps=2):
        spans, spent = spans_of(result, result["rank"]), result["spent"]
        for kind in ("publish inter", "publish intra", "route intra", "route inter"):
            total = sum(span[6] - span[5] for span in spans if span[2] == kind)
            # Differences of seconds since the epoch are exact to less than a microsecond.
            assert total == pytest.approx(spent[f"{kind.replace(' ', '_')}_s"], rel=1e-6, abs=1e-5)
        waits = sum(spent[f"wait_{phase}_s"] for phase in ("forward", "backward", "step"))
        assert sum(span[6] - span[5] for span in spans if span[2] in WAITS) == pytest.approx(waits, abs=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_modules_compute_between_their_weights_and_their_release(ranks, mesh):
    result = ranks.run(cases.record, mesh, steps=2)[0]
    assert result["num_steps"] == 2
    for rank in range(4):
        counts = collections.Counter(
            (kind, unit) for _, _, kind, unit, *_ in spans_of(result, rank) if kind not in ENGINE
        )
        assert counts == {
            **{(kind, unit): 2 for kind in ("forward", "backward") for unit in result["units"]},
            ("optimizer step", ""): 2,
            **{("update", f"batch {index}"): 2 for index in range(result["num_batches"][rank])},
        }
        for unit in result["units"]:
            mine = [span for span in spans_of(result, rank) if span[3] == unit and span[1] == "compute"]
            kinds = [span[2] for span in sorted(mine, key=lambda span: span[5])]
            kept = unit == result["units"][-1]  # from its forward to its backward
            forward = ["await weights", "forward", *([] if kept else ["reshard", "await weights"])]
            step = [*forward, "backward", "reshard", "finish route"]
            # A step's own reshards have nothing to wait for, and come before its updates.
            assert [kind for kind in kinds if kind != "reshard"] == [k for k in 2 * step if k != "reshard"]


def test_what_is_hidden_is_a_share(ranks):
    results = ranks.run(cases.record, (2, 2), steps=2)
    for phase, share in results[0]["hidden"].items():
        assert math.isnan(share) or 0 <= share <= 1, phase
    assert 0 <= results[0]["hidden"][None] <= 1
    assert [result["hidden"][None] for result in results] == [results[0]["hidden"][None]] * 4
    for word in ("2 steps on 4 ranks (2 x 2)", "hidden", "publish inter", "route intra", "optimizer step"):
        assert word in results[0]["summary"]


def test_the_trace_is_one_event_a_span(ranks, tmp_path):
    result = ranks.run(cases.record, (2, 2), folder=str(tmp_path))[0]
    trace = cases.trace_of(str(tmp_path))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(result["spans"])
    assert min(event["ts"] for event in events) >= 0
    names = {event["name"] for event in events}
    assert {f"publish inter {unit}" for unit in result["units"]} <= names
    labels = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert labels == [f"rank {rank}" for rank in range(4)]
    assert all(event["args"]["issued"] <= event["args"]["started"] == event["ts"] for event in events)


def test_pictures(ranks, tmp_path):
    pytest.importorskip("matplotlib")
    ranks.run(cases.draw, (2, 2), folder=str(tmp_path))
    for name in ("last.png", "schedule.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "first.svg").read_text()[:2000]


def test_a_missing_matplotlib_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    schedule = cases.dmuon.schedule(Trained(None).model)
    with pytest.raises(ImportError, match=r"schedule.save_picture.*dmuon\[examples\]"):
        schedule.save_picture(tmp_path / "no.png")


@pytest.mark.parametrize("mesh", [*MESHES, (4, 1)])
@pytest.mark.parametrize(("node_copy", "lookahead"), [(True, 2), (True, 0), (False, 2), (False, 1)])
def test_the_schedule_knows_what_each_rank_sends(ranks, mesh, node_copy, lookahead):
    for result in ranks.run(cases.record, mesh, node_copy=node_copy, lookahead=lookahead):
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


def test_one_process_has_lanes_too():
    trained = Trained(None)
    with cases.dmuon.profile(trained.model) as profile:
        trained.step()
    assert {span.lane for span in profile.spans} == {"compute", "intra"}
    assert "blocks.0" in str(cases.dmuon.schedule(trained.model))


def test_times_of_a_host_that_only_issues_claim_nothing():
    trained = Trained(None)
    with cases.dmuon.profile(trained.model) as profile:
        trained.step()
    profile._host_times = True
    assert "as the host issued it" in profile.summary() and "%" not in profile.summary()
    with pytest.raises(ValueError, match="expected a model on CPUs"):
        profile.hidden()


def test_wrong_use_is_named(ranks):
    for notes in ranks.run(cases.misuse, (2, 2)):
        assert "profile: model: expected one context at a time" in notes["nested"]
        assert "profile: model" in notes["plain"] and "schedule: model" in notes["schedule of a plain model"]
        assert "nothing has been traced yet" in notes["untraced"]
        assert "nothing has been traced yet" in notes["picture of nothing"]
        assert notes["empty"].startswith("0 steps on 4 ranks")
        assert "'lunch'" in notes["phase"] and "one or more whole steps, got none" in notes["no step"]


def test_a_profile_changes_nothing(ranks):
    plain = ranks.run(cases.watched, (2, 2), profiled=False)
    profiled = ranks.run(cases.watched, (2, 2), profiled=True)
    for (expected, _), (weights, (before, during, after)) in zip(plain, profiled, strict=True):
        assert before == after < during
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
