"""Pipeline stages: their schedules, and clipping by one norm of all stages, which skip a step together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from refusals import REFUSED, Refusals, expect_refusal, with_gradients
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

import dmuon

WIDTH = 12


def stage_model(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))


def loss_of(model: nn.Module, stage: int, rank: int) -> torch.Tensor:
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * stage + rank))
    return (1 + 9 * stage) * model(x).square().mean()


def clipped(mesh: Any, spoiled: int | None, wrong: int | None) -> dict[str, Any]:
    """A step of two stages; the loss of one may be infinite, its max_norm wrong."""
    stages, dp = mesh["replicate"], mesh["shard"]
    stage, rank = mesh.get_coordinate()
    model = stage_model(stage)
    dmuon.dedicate_params(model, dp)
    fully_shard(model, mesh=dp)
    optimizer = dmuon.Muon(model, lr=0.1, ns_dtype=torch.float32)
    loss_of(model, stage, rank).mul(math.inf if spoiled == stage else 1).backward()
    said: dict[str, Any] = {"stage": stage}
    max_norm = -1.0 if wrong == stage else 0.5
    try:
        said["norm"] = dmuon.clip_grad_norm_(model, max_norm, pp_mesh=stages)
    except ValueError as error:
        said["error"] = str(error)
        return said
    said["after"] = {name: float(norm) for name, norm in dmuon.grad_norms(model).items()}
    optimizer.step()
    said["skipped"] = optimizer.skipped_steps
    optimizer.zero_grad()
    loss_of(model, stage, rank).backward()
    optimizer.step()  # without clipping: what the other stage had found does not stay
    said["skipped after"] = optimizer.skipped_steps
    return said


def test_all_stages_are_clipped_by_one_norm(ranks):
    models = [stage_model(stage) for stage in range(2)]
    for stage, model in enumerate(models):
        sum(loss_of(model, stage, rank) for rank in range(2)).div(2).backward()
    together = nn.ModuleList(models)
    norm = nn.utils.clip_grad_norm_(together.parameters(), 0.5)
    for said in ranks.run(clipped, (2, 2), spoiled=None, wrong=None):
        assert float(said["norm"]) == pytest.approx(float(norm), rel=1e-4)
        weights = {n: p.grad.norm().item() for n, p in models[said["stage"]].named_parameters() if p.ndim == 2}
        assert said["after"] == pytest.approx(weights, rel=1e-4)
        assert said["skipped after"] == said["skipped"] == 0


def test_what_is_not_finite_in_one_stage_makes_all_skip_that_step_alone(ranks):
    for said in ranks.run(clipped, (2, 2), spoiled=1, wrong=None):
        assert math.isnan(said["norm"])
        assert said["skipped after"] == said["skipped"] == 1


def test_a_stage_that_raises_keeps_no_other_waiting(ranks):
    first, second = (
        [s for s in ranks.run(clipped, (2, 2), spoiled=None, wrong=0) if s["stage"] == stage] for stage in range(2)
    )
    assert all("max_norm: expected a positive number, got -1.0" in said["error"] for said in first)
    assert all(said["skipped"] == 1 for said in second)


def a_mesh_of_two_dimensions(mesh: Any) -> None:
    dmuon.clip_grad_norm_(with_gradients(mesh)[0], 1.0, pp_mesh=mesh)


def test_a_mesh_of_stages_has_one_dimension(ranks):
    words = ("clip_grad_norm_: pp_mesh: expected a one-dimensional DeviceMesh or None", "got DeviceMesh")
    expect_refusal(ranks, a_mesh_of_two_dimensions, {}, words)


def several_stages(mesh: Any, pp: bool, spoiled: bool) -> dict[str, Any]:
    """A step of two stages on every rank of 2 pipeline ranks, or of both models of one trainer without a pipeline."""
    pp_mesh, dp = (mesh["replicate"], mesh["shard"]) if pp else (None, mesh)
    of_rank = [mesh.get_coordinate()[0], 2 + mesh.get_coordinate()[0]] if pp else [0, 1]
    stages: dict[int, Any] = {}
    for stage in of_rank:
        model = stage_model(stage)
        dmuon.dedicate_params(model, dp)
        fully_shard(model, mesh=dp)
        stages[stage] = model, dmuon.Muon(model, lr=0.1, ns_dtype=torch.float32)
        place = dp.mesh.flatten().tolist().index(torch.distributed.get_rank())
        loss_of(model, stage, place).mul(math.inf if spoiled and stage == 1 else 1).backward()
    models = [model for model, _ in stages.values()]
    found: dict[str, Any] = {"norm": float(dmuon.clip_grad_norm_(models, 0.5, pp_mesh=pp_mesh)), "after": {}}
    for stage, (model, _) in stages.items():
        found["after"] |= {f"{stage}.{name}": float(norm) for name, norm in dmuon.grad_norms(model).items()}
        if spoiled:
            model[0].weight.grad.mul_(0.5)  # the next verdict is a new one
    for _, optimizer in stages.values():
        optimizer.step()
    found["skipped"] = [optimizer.skipped_steps for _, optimizer in stages.values()]
    for stage, (model, optimizer) in stages.items():
        model.zero_grad()
        loss_of(model, stage, 0).backward()
        optimizer.step()
    found["skipped after"] = [optimizer.skipped_steps for _, optimizer in stages.values()]
    return found


@pytest.mark.parametrize("pp", [False, True])
def test_several_models_of_a_rank_are_clipped_by_one_norm(ranks, pp):
    size = 2 if pp else 4
    models = [stage_model(stage) for stage in range(4 if pp else 2)]
    for stage, model in enumerate(models):
        sum(loss_of(model, stage, rank) for rank in range(size)).div(size).backward()
    together = nn.ModuleList(models)
    norm = nn.utils.clip_grad_norm_(together.parameters(), 0.5)
    weights = {name: p.grad.norm().item() for name, p in together.named_parameters() if p.ndim == 2}
    after: dict[str, float] = {}
    for found in ranks.run(several_stages, (2, 2), pp=pp, spoiled=False):
        assert found["norm"] == pytest.approx(float(norm), rel=1e-4)
        assert found["skipped"] == [0, 0]
        after |= found["after"]
    assert after == pytest.approx(weights, rel=1e-4)


@pytest.mark.parametrize("pp", [False, True])
def test_what_is_not_finite_in_one_of_several_models_makes_all_skip_until_gradients_are_cleared(ranks, pp):
    for found in ranks.run(several_stages, (2, 2), pp=pp, spoiled=True):
        assert math.isnan(found["norm"]) and found["skipped after"] == found["skipped"] == [1, 1]


refused = Refusals()


@refused("clip_grad_norm_: model: expected a model with dmuon.Muon or a list of them, got an empty list", which="none")
@refused("clip_grad_norm_: model[1]: expected each model once", which="twice")
@refused("clip_grad_norm_: model: expected the module that dmuon.dedicate_params(model, ...) was given", which="plain")
@refused("ranks differ", "number of models = 1", "number of models = 2", which="some")
def wrong_models(mesh: Any, which: str) -> None:
    model = with_gradients(mesh)[0]
    others = {"none": [], "twice": [model, model], "plain": [model, nn.Linear(2, 2)]}
    if which == "some":
        second = with_gradients(mesh)[0]
        others["some"] = [model, second] if mesh.get_local_rank(0) else [model]
    dmuon.clip_grad_norm_(others[which], 1.0)


def step_of_a_pipeline(mesh: Any, schedule: Any) -> dict[str, float]:
    """Both stages are on this rank. Returns norms of gradients."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    models = [stage_model(index) for index in range(2)]
    for model in models:
        dmuon.dedicate_params(model, mesh)
        dmuon.Muon(model)
    device, group = torch.get_default_device(), groups[dist.get_rank()]
    stages = [PipelineStage(model, index, 2, device, group=group) for index, model in enumerate(models)]
    schedule(stages, 2, loss_fn=nn.functional.mse_loss).step(torch.ones(4, WIDTH), target=torch.ones(4, WIDTH))
    for group in groups:
        dist.destroy_process_group(group)
    dmuon.clip_grad_norm_(models, 1e9)
    return {f"{i}.{n}": float(norm) for i, model in enumerate(models) for n, norm in dmuon.grad_norms(model).items()}


@pytest.mark.parametrize("schedule", [ScheduleLoopedBFS, ScheduleInterleaved1F1B])
def test_a_schedule_of_several_stages_gives_the_gradients_of_one_model(ranks, schedule):
    model = nn.Sequential(*(stage_model(stage) for stage in range(2)))
    nn.functional.mse_loss(model(torch.ones(4, WIDTH)), torch.ones(4, WIDTH)).backward()
    expected = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.ndim == 2}
    for norms in ranks.run(step_of_a_pipeline, (2, 2), schedule=schedule):
        assert norms == pytest.approx(expected, rel=1e-4)


@refused("view.default on", "zero-bubble", "ScheduleInterleaved1F1B", schedule=ScheduleInterleavedZeroBubble)
def zero_bubble(mesh: Any, schedule: Any) -> None:
    step_of_a_pipeline(mesh, schedule)


@pytest.mark.parametrize(REFUSED, refused)
def test_what_pipelines_cannot_have_raises_on_every_rank(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
