"""Costs that are measured on the ranks when Muon is made: once, alike on all, and kept."""

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

import torch
from default_device import own_random_numbers, random_state
from dmuon._planning import costs
from models import make_gpt
from plans import plan_json, started
from training import place_of, shard

import dmuon

SHAPES = {(72, 24), (24, 24), (41, 24), (24, 41)}


def cache_in(folder: str) -> Any:
    """Measured costs are kept there for a while."""
    return mock.patch.dict(os.environ, DMUON_CACHE_DIR=folder)


def measured_calls(mesh: Any, folder: str) -> tuple[int, int, str, str]:
    """How often two models in a row are measured, and the costs that their plans hold."""
    calls: list[int] = []
    measure = costs.measure

    def counted(place: Any, jobs: Any, *rest: Any, **named: Any) -> Any:
        calls.append(len(jobs))
        return measure(place, jobs, *rest, **named)

    with mock.patch.object(costs, "measure", counted), cache_in(folder):
        first = json.loads(plan_json(mesh, costs="measured"))["costs"]
        number = len(calls)
        second = json.loads(plan_json(mesh, costs="measured"))["costs"]
        return number, len(calls), json.dumps(first), json.dumps(second)


def test_costs_are_measured_once_and_kept(ranks, tmp_path):
    for first, both, before, after in ranks.run(measured_calls, (2, 2), folder=str(tmp_path)):
        assert (first, both) == (1, 1)
        assert before == after
        table = json.loads(before)
        assert "4 ranks at once" in table["source"]
        assert {(s["rows"], s["cols"]) for s in table["shapes"]} == SHAPES
        assert all(b["ns"] > 0 for s in table["shapes"] for b in s["batches"])
        assert all([b["size"] for b in s["batches"]] == [1, 2, 3] for s in table["shapes"])


def test_what_is_kept_may_be_damaged(ranks, tmp_path):
    ranks.run(measured_calls, (2, 2), folder=str(tmp_path))
    (kept,) = (tmp_path / "costs").iterdir()
    kept.write_text(kept.read_text()[:-40])
    assert [first for first, *_ in ranks.run(measured_calls, (2, 2), folder=str(tmp_path))] == [1] * 4


def measured_where_large_batches_fail(mesh: Any, folder: str) -> dict[str, Any]:
    """Rank 1 has no memory for batches of more than one."""
    run = costs._run

    def failing(job: costs.Job, *rest: Any) -> int:
        if job.size > 1 and place_of(mesh)[0] == 1:
            raise torch.OutOfMemoryError("out of memory, says the test")
        return run(job, *rest)

    with mock.patch.object(costs, "_run", failing), cache_in(folder):
        return json.loads(plan_json(mesh, costs="measured"))["costs"]


def test_a_batch_that_one_rank_cannot_run_is_scaled_on_all(ranks, tmp_path):
    tables = ranks.run(measured_where_large_batches_fail, (2, 2), folder=str(tmp_path))
    assert tables == [tables[0]] * 4
    for shape in tables[0]["shapes"]:
        assert all(0 < batch["ns"] < 10**12 for batch in shape["batches"])
    assert tables[0]["source"].endswith("4 ranks at once; 8 batches scaled by the model")
    (kept,) = (tmp_path / "costs").iterdir()
    assert {size for *_, size, _ in json.loads(kept.read_text())["times"]} == {1}


def error_where_one_rank_cannot_run(mesh: Any, folder: str) -> str:
    """What each rank raises where rank 2 cannot run batches of two, in the second round."""
    run, calls = costs._run, []

    def failing(job: costs.Job, *rest: Any) -> int:
        calls.append(job)
        if calls.count(job) == 3 and job.size == 2 and torch.distributed.get_rank() == 2:
            raise RuntimeError("a fault, says the test")
        return run(job, *rest)

    with mock.patch.object(costs, "_run", failing), cache_in(folder):
        try:
            started(mesh, costs="measured")
        except ValueError as raised:
            return str(raised)
    return ""


def test_what_else_one_rank_raises_reaches_all_and_nobody_waits(ranks, tmp_path):
    messages = ranks.run(error_where_one_rank_cannot_run, (2, 2), folder=str(tmp_path))
    for rank, message in enumerate(messages):
        assert "failed: RuntimeError: a fault, says the test" in message
        assert ("(on rank 2)" in message) == (rank != 2)
    assert not list(tmp_path.iterdir())


@own_random_numbers()
def random_state_is_left_alone(mesh: Any, folder: str) -> bool:
    with cache_in(folder):
        model = make_gpt()
        dmuon.dedicate_params(model, mesh, costs="measured")
        shard(model, mesh)
        torch.manual_seed(7)
        expected = random_state()
        dmuon.Muon(model)
        return bool((random_state() == expected).all())


def test_measuring_leaves_random_numbers_alone(ranks, tmp_path):
    assert all(ranks.run(random_state_is_left_alone, (2, 2), folder=str(tmp_path)))
