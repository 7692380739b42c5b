"""A profile shows what ran, adds up to the counters, and changes nothing."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from dmuon._inspecting.profile import Overlap, Profile
from dmuon._inspecting.recorder import Record, Span
from models import batch, loss_of, make_gpt
from profiled import MESHES, Trained, raised, record, spans_of

import dmuon

WAITS = ("await weights", "reshard", "finish route intra", "finish route inter")
ENGINE = (*WAITS, "publish inter", "publish intra", "route intra", "route inter")


@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_sees_the_spans_of_all(ranks, mesh):
    results = ranks.run(record, mesh)
    assert {span[0] for span in results[0]["spans"]} == set(range(4))
    for result in results[1:]:
        assert result["spans"] == results[0]["spans"]
        assert result["summary"] == results[0]["summary"]
    for _, _, _, _, issued, started, done in results[0]["spans"]:
        assert issued <= started <= done


@pytest.mark.parametrize("mesh", MESHES)
def test_a_lane_does_one_thing_at_a_time(ranks, mesh):
    result = ranks.run(record, mesh, steps=3)[0]
    for rank, lane in itertools.product(range(4), ("intra", "inter")):
        times = sorted((span[5], span[6]) for span in spans_of(result, rank) if span[1] == lane)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))
        assert bool(times) == (lane == "intra" or mesh == (2, 2))


@pytest.mark.cpu("on a device the counters are of the host, which issues, and the spans of the device, which runs")
def test_spans_add_up_to_the_counters(ranks):
    for result in ranks.run(record, (2, 2), steps=2):
        spans, spent = spans_of(result, result["rank"]), result["spent"]
        for kind in ("publish inter", "publish intra", "route intra", "route inter"):
            total = sum(span[6] - span[5] for span in spans if span[2] == kind)
            # Differences of seconds since the epoch are exact to less than a microsecond.
            assert total == pytest.approx(spent[f"{kind.replace(' ', '_')}_s"], rel=1e-6, abs=1e-5)
        waits = sum(spent[f"wait_{phase}_s"] for phase in ("forward", "backward", "step"))
        assert sum(span[6] - span[5] for span in spans if span[2] in WAITS) == pytest.approx(waits, abs=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
def test_modules_compute_between_their_weights_and_their_release(ranks, mesh):
    result = ranks.run(record, mesh, steps=2)[0]
    assert result["num_steps"] == 2
    for rank in range(4):
        counts = collections.Counter(
            (kind, unit) for _, _, kind, unit, *_ in spans_of(result, rank) if kind not in ENGINE
        )
        assert counts == {
            **{(kind, unit): 2 for kind in ("forward", "backward") for unit in result["units"]},
            ("optimizer step", ""): 2,
            **{
                (kind, f"batch {index}"): 2
                for kind in ("prepare", "orthogonalise", "apply", "finish update")
                for index in range(result["num_batches"][rank])
            },
        }
        for unit in result["units"]:
            mine = [span for span in spans_of(result, rank) if span[3] == unit and span[1] == "compute"]
            kinds = [span[2] for span in sorted(mine, key=lambda span: span[5])]
            kept = unit == result["units"][-1]  # from its forward to its backward
            forward = ["await weights", "forward", *([] if kept else ["reshard", "await weights"])]
            finish = ["finish route intra", *(["finish route inter"] if mesh == (2, 2) else [])]
            step = [*forward, "backward", "reshard", *finish]
            # A step's own reshards have nothing to wait for, and come before its updates.
            assert [kind for kind in kinds if kind != "reshard"] == [k for k in 2 * step if k != "reshard"]


def share_hidden(result, phases, of=frozenset({"intra", "inter"}), waits=WAITS):
    """1 - (time in which a lane was busy and compute waited) / (time in which a lane was busy), summed over ranks."""
    busy = waiting = 0.0
    for rank in range(4):
        mine = [(lane, kind, begin, end) for r, lane, kind, _, _, begin, end in result["spans"] if r == rank]
        windows = [
            ("phase", "", begin, end) for r, name, begin, end in result["phases"] if r == rank and name in phases
        ]
        edges = sorted({time for *_, begin, end in mine + windows for time in (begin, end)})
        for begin, end in itertools.pairwise(edges):
            inside = [(lane, kind) for lane, kind, left, right in mine + windows if left <= begin and end <= right]
            lanes = {lane for lane, _ in inside}
            if "phase" in lanes and lanes & of:
                busy += end - begin
                waiting += (end - begin) * any(kind in waits for _, kind in inside)
    return 1 - waiting / busy if busy > 0 else math.nan


def test_what_is_hidden_is_the_share_of_busy_lanes_without_a_wait(ranks):
    results = ranks.run(record, (2, 2), steps=2)
    hidden = results[0]["hidden"]
    for phase in ("forward", "backward", "step"):
        assert hidden[phase] == pytest.approx(share_hidden(results[0], {phase}), abs=1e-6, nan_ok=True)
    assert not math.isnan(hidden["backward"])  # in a step nothing may be left to do for lanes
    every = {"forward", "backward", "step", "between steps"}
    updates = share_hidden(results[0], every, {"update"}, {*WAITS, "finish update"})
    assert results[0]["hidden_updates"] == pytest.approx(updates, abs=1e-6)
    assert 0 < hidden[None] <= 1  # all of it, where ranks wait for their cores longer than for messages
    for result in results:
        assert result["hidden"][None] == hidden[None]
        title, _, *rows = result["summary"].splitlines()
        assert title.startswith("2 steps on 4 ranks (2 x 2)")
        for row, phase in zip(rows, ("forward", "backward", "step", "between steps", None), strict=False):
            assert row.startswith(phase or "all")
            assert row.endswith("" if math.isnan(hidden[phase]) else f" {hidden[phase]:.0%}")
        assert rows[5].startswith("all, the updates")
        assert rows[5].endswith(f" {results[0]['hidden_updates']:.0%}")
        assert rows[11].split()[0] == "all" and f" {1e3 * results[0]['overlap'][1]:.2f} " in rows[11]
        kinds = {row[:15].strip() for row in rows[12:]}
        assert {"publish inter", "publish intra", "route inter", "route intra", "optimizer step"} <= kinds


def test_overlap_tells_when_the_wire_and_compute_were_busy():
    def span(lane, kind, begin, end):
        return Span(0, lane, kind, "", begin, begin, end)

    spans = [
        span("compute", "forward", 1, 6),
        span("compute", "await weights", 3, 5),  # of a unit inside
        span("inter", "publish inter", 2, 4),
        span("intra", "publish intra", 0, 9),
        span("compute", "backward", 7, 9),
        span("inter", "route inter", 8, 9.5),
        span("compute", "finish update", 8.5, 9),
    ]
    profile = Profile()
    profile.spans = spans
    profile._records = [Record(0, spans, [("forward", 0, 6.5), ("backward", 6.5, 10)], [(0, 5), (5, 10)])]
    assert profile.overlap("forward") == Overlap(both=1 / 2, wire=1 / 2, compute=2 / 2, neither=2.5 / 2)
    assert profile.overlap("backward") == Overlap(both=0.5 / 2, wire=1 / 2, compute=1 / 2, neither=1 / 2)
    assert profile.overlap() == Overlap(both=1.5 / 2, wire=2 / 2, compute=3 / 2, neither=3.5 / 2)
    # A mesh of one node has no lane between nodes.
    profile.spans = [span for span in spans if span.lane != "inter"]
    profile._records[0].spans[:] = profile.spans
    assert profile.overlap("backward") == Overlap(both=1.5 / 2, wire=1 / 2, compute=0, neither=1 / 2)


def test_the_trace_is_one_event_a_span(ranks, tmp_path):
    result = ranks.run(record, (2, 2), folder=str(tmp_path))[0]
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(result["spans"])
    assert min(event["ts"] for event in events) >= 0
    names = {event["name"] for event in events}
    assert {f"publish inter {unit}" for unit in result["units"]} <= names
    labels = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert labels == [f"rank {rank}" for rank in range(4)]
    assert all(event["args"]["issued"] <= event["ts"] for event in events)


def draw(mesh: Any, folder: str) -> None:
    trained = Trained(mesh)
    with dmuon.profile(trained.model) as profile:
        for _ in range(2):
            trained.step()
    if trained.place[0] == 0:
        profile.save_picture(Path(folder) / "last.png")
        profile.save_picture(Path(folder) / "first.svg", step=0, only_ranks=[3])
        dmuon.schedule(trained.model).save_picture(Path(folder) / "schedule.png")
        for name, value in (("step", 2), ("step", -3), ("only_ranks", [4]), ("only_ranks", [])):
            message = raised(lambda wrong={name: value}: profile.save_picture(Path(folder) / "no.png", **wrong))
            assert f"save_picture: {name}: expected" in message and message.endswith(f"got {value}")
        message = raised(lambda: profile.save_picture("step.bogus"))
        assert "profile.save_picture: expected a file that ends in one of" in message


def test_pictures(ranks, tmp_path):
    pytest.importorskip("matplotlib")
    ranks.run(draw, (2, 2), folder=str(tmp_path))
    assert not (tmp_path / "no.png").exists()
    for name in ("last.png", "schedule.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "first.svg").read_text()[:2000]


def test_one_process_has_lanes_too():
    trained = Trained(None)
    with dmuon.profile(trained.model) as profile:
        trained.step()
    assert {span.lane for span in profile.spans} == {"compute", "update", "intra"}
    assert "blocks.0" in str(dmuon.schedule(trained.model))


def test_what_follows_the_last_step_does_not_count():
    trained = Trained(None)
    with dmuon.profile(trained.model) as profile:
        trained.step()
        for _ in range(3):
            loss_of(trained.model, batch(0))
    record = profile._records[0]
    last = record.steps[-1][1]
    assert [name for name, begin, _ in record.phases if begin >= last] == ["between steps", "forward"]
    (forward,) = [end - begin for name, begin, end in record.phases if name == "forward" and end <= last]
    row = next(line for line in profile.summary().splitlines() if line.startswith("forward "))
    assert float(row.split()[1]) == pytest.approx(1e3 * forward, abs=0.01)
    assert (
        next(line for line in profile.summary().splitlines() if line.startswith("optimizer step")).split()[3] == "1.0"
    )
    of_units = [line for line in profile.summary().splitlines() if line.startswith("forward ") and " compute " in line]
    assert float(of_units[0].split()[2]) == len(trained.model.blocks)


def misuse(mesh: Any) -> dict[str, str]:
    trained = Trained(mesh, steps=0)

    def nested() -> None:
        with dmuon.profile(trained.model), dmuon.profile(trained.model):
            pass

    def plain() -> None:
        with dmuon.profile(make_gpt()):
            pass

    untraced = dmuon.schedule(trained.model)
    notes = {
        "nested": raised(nested),
        "plain": raised(plain),
        "schedule of a plain model": raised(lambda: dmuon.schedule(make_gpt())),
        "untraced": str(untraced),
        "picture of nothing": raised(lambda: untraced.save_picture("no.png")),
    }
    trained.step()
    with dmuon.profile(trained.model) as profile:  # a context that raised can be followed by another
        pass
    notes["empty"] = profile.summary()
    notes["phase"] = raised(lambda: profile.hidden("lunch"))
    notes["overlap"] = raised(lambda: profile.overlap("lunch"))
    notes["no step"] = raised(lambda: profile.save_picture("no.png"))
    return notes


def test_a_step_begins_after_its_closure():
    trained = Trained(None)

    def closure() -> torch.Tensor:
        loss = loss_of(trained.model, batch(0))
        loss.backward()
        return loss

    with dmuon.profile(trained.model) as profile:
        trained.optimizer.step(closure)
        trained.optimizer.step(closure=closure)
    steps = [span for span in profile.spans if span.kind == "optimizer step"]
    backwards = [span for span in profile.spans if span.kind == "backward"]
    for step, others in zip(steps, (backwards[: len(backwards) // 2], backwards[len(backwards) // 2 :]), strict=True):
        assert step.started >= max(span.done for span in others)
    assert [phase for phase, _, _ in profile._records[0].phases].count("step") == 4


def test_wrong_use_is_named(ranks):
    for notes in ranks.run(misuse, (2, 2)):
        assert "profile: model: expected one context at a time" in notes["nested"]
        assert "profile: model" in notes["plain"] and "schedule: model" in notes["schedule of a plain model"]
        assert "nothing has been traced yet" in notes["untraced"]
        assert "nothing has been traced yet" in notes["picture of nothing"]
        assert notes["empty"].startswith("0 steps on 4 ranks")
        assert "'lunch'" in notes["phase"] and "'lunch'" in notes["overlap"]
        assert "one or more whole steps, got none" in notes["no step"]


def watched(mesh: Any, profiled: bool) -> tuple[list[torch.Tensor], list[int]]:
    """Weights after three steps, the second of them profiled or not, and how many hooks there were in each."""
    trained = Trained(mesh, steps=0)
    hooks = []
    for step in range(3):
        with dmuon.profile(trained.model) if profiled and step == 1 else contextlib.nullcontext():
            trained.step()
            hooks.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in trained.model.modules()))
    with dmuon.full_params(trained.model):
        return [p.detach().clone() for p in trained.model.parameters()], hooks


def test_a_profile_changes_nothing(ranks):
    plain = ranks.run(watched, (2, 2), profiled=False)
    profiled = ranks.run(watched, (2, 2), profiled=True)
    for (expected, _), (weights, (before, during, after)) in zip(plain, profiled, strict=True):
        assert before == after < during
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
