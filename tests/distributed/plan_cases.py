"""Programs that plan; run on the ranks of a pool."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from dmuon._planning import costs
from models import make_gpt
from trajectory_cases import place_of, shard

import dmuon


def cache_in(folder: str) -> Any:
    """Measured costs are kept there for a while."""
    return mock.patch.dict(os.environ, DMUON_CACHE_DIR=folder)


def started(mesh: Any, depth: int = 3, **options: Any) -> tuple[nn.Module, dmuon.Muon]:
    model = make_gpt(depth=depth)
    dmuon.dedicate_params(model, mesh, **options)
    shard(model, mesh)
    return model, dmuon.Muon(model, ns_dtype=torch.float32)


def plan_json(mesh: Any, **options: Any) -> str:
    _, opt = started(mesh, **options)
    return opt.plan.to_json()


def error(mesh: Any, **options: Any) -> str:
    try:
        started(mesh, **options)
    except ValueError as raised:
        return str(raised)
    return ""


def saved(mesh: Any, path: str, **options: Any) -> list[int]:
    model, opt = started(mesh, **options)
    if place_of(mesh)[0] == 0:
        dmuon.plan(model).save(path)
    torch.distributed.barrier()
    return opt.plan.owner


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


def measured_where_large_batches_fail(mesh: Any, folder: str) -> dict[str, Any]:
    """Rank 1 has no memory for batches of more than one."""
    run = costs._run

    def failing(job: costs.Job, *rest: Any) -> int:
        if job.size > 1 and place_of(mesh)[0] == 1:
            raise torch.OutOfMemoryError("out of memory, says the test")
        return run(job, *rest)

    with mock.patch.object(costs, "_run", failing), cache_in(folder):
        return json.loads(plan_json(mesh, costs="measured"))["costs"]


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
        except RuntimeError as raised:
            return str(raised)
    return ""


def random_state_is_left_alone(mesh: Any, folder: str) -> bool:
    with cache_in(folder):
        model = make_gpt()
        dmuon.dedicate_params(model, mesh, costs="measured")
        shard(model, mesh)
        torch.manual_seed(7)
        expected = torch.get_rng_state()
        dmuon.Muon(model)
        return bool((torch.get_rng_state() == expected).all())


def table_for(path: Path, times: dict[tuple[int, int], int]) -> None:
    """A table of costs with single matrices only."""
    shapes = [{"rows": r, "cols": c, "batches": [{"size": 1, "ns": ns}]} for (r, c), ns in times.items()]
    path.write_text(json.dumps({"schema_version": 1, "source": "a test", "shapes": shapes}))
