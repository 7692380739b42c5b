"""Programs that are profiled, on the ranks of a pool; what the tests of profiles and of schedules share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from models import Gpt, batch, loss_of, make_gpt, part
from training import AHEAD, dedicate, place_of, shard

import dmuon

MESHES = ((4,), (2, 2))


class Trained:
    """A model whose passes have been traced, and one step of it at a time."""

    def __init__(self, mesh: Any, schedule: dict[str, Any] = AHEAD, steps: int = 2) -> None:
        self.model: Gpt = make_gpt()
        dedicate(self.model, mesh, schedule)
        if mesh is not None:
            shard(self.model, mesh)
        self.optimizer = dmuon.Muon(self.model, ns_dtype=torch.float32)
        self.place = place_of(mesh)
        self.count = 0
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        loss_of(self.model, part(batch(self.count), *self.place)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1

    def stats(self) -> dict[str, float]:
        self.optimizer._runtime.engine.drain()
        return self.optimizer.stats()


def record(mesh: Any, schedule: dict[str, Any] = AHEAD, steps: int = 1, folder: str = "") -> dict[str, Any]:
    """A profile of a trained model's steps, with counters before and after, and the schedule."""
    trained = Trained(mesh, schedule)
    before = trained.stats()
    with dmuon.profile(trained.model) as profile:
        for _ in range(steps):
            trained.step()
    after = trained.stats()
    if folder and trained.place[0] == 0:
        profile.save_trace(Path(folder) / "trace.json")
    schedule = dmuon.schedule(trained.model)
    return {
        "rank": trained.place[0],
        "units": [unit.name for unit in trained.optimizer._runtime.units if unit.leaves],
        "num_batches": [
            sum(slot == rank for slot, _ in trained.optimizer.plan.batches) for rank in range(trained.place[1])
        ],
        "spans": [dataclasses.astuple(span) for span in profile.spans],
        "phases": [(record.rank, *phase) for record in profile._records for phase in record.phases],
        "num_steps": profile.num_steps,
        "spent": {key: after[key] - before[key] for key in after},
        "hidden": {phase: profile.hidden(phase) for phase in ("forward", "backward", "step", "between steps", None)},
        "overlap": dataclasses.astuple(profile.overlap()),
        "hidden_updates": profile.hidden(of="updates"),
        "summary": profile.summary(),
        "schedule": schedule,
        "table": str(schedule),
    }


def spans_of(result, rank):
    return [span for span in result["spans"] if span[0] == rank]


def raised(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""
