"""Profiles and schedules of a small GPT; run on the ranks of a pool."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from models import Gpt, batch, loss_of, make_gpt, part
from trajectory_cases import place_of, shard

import dmuon


class Trained:
    """A model whose passes have been traced, and one step of it at a time."""

    def __init__(self, mesh: Any, steps: int = 2, **dedicate: Any) -> None:
        self.model: Gpt = make_gpt()
        dmuon.dedicate_params(self.model, mesh, **{"reshard_after_forward": True, **dedicate})
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


def record(mesh: Any, steps: int = 1, folder: str = "", **dedicate: Any) -> dict[str, Any]:
    """A profile of a trained model's steps, with counters before and after, and the schedule."""
    trained = Trained(mesh, **dedicate)
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
        "units": [unit.name for unit in trained.optimizer._runtime.units],
        "num_batches": [
            sum(slot == rank for slot, _ in trained.optimizer.plan.batches) for rank in range(trained.place[1])
        ],
        "spans": [dataclasses.astuple(span) for span in profile.spans],
        "num_steps": profile.num_steps,
        "spent": {key: after[key] - before[key] for key in after},
        "hidden": {phase: profile.hidden(phase) for phase in ("forward", "backward", "step", "between steps", None)},
        "summary": profile.summary(),
        "schedule": schedule,
        "table": str(schedule),
    }


def draw(mesh: Any, folder: str) -> None:
    trained = Trained(mesh)
    with dmuon.profile(trained.model) as profile:
        for _ in range(2):
            trained.step()
    if trained.place[0] == 0:
        profile.save_picture(Path(folder) / "last.png")
        profile.save_picture(Path(folder) / "first.svg", step=0, only_ranks=[3])
        dmuon.schedule(trained.model).save_picture(Path(folder) / "schedule.png")
        for wrong in ({"step": 2}, {"step": -3}, {"only_ranks": [4]}, {"only_ranks": []}):
            assert "save_picture" in raised(lambda wrong=wrong: profile.save_picture(Path(folder) / "no.png", **wrong))


def raised(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


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
    notes["no step"] = raised(lambda: profile.save_picture("no.png"))
    return notes


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


def trace_of(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "trace.json").read_text())
    return found
