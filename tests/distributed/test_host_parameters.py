"""FSDP2 may keep on the host what AdamW updates (CPUOffloadPolicy), while matrices stay at their owners' devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import batch, make_gpt
from pool import TEST_DEVICE
from refusals import attempt
from scenario import Session, assert_equal_to_reference, check, language_loss, run_scenario
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import AHEAD, LR, WEIGHT_DECAY, dedicate, place_of, shard, weights_of

import dmuon

DECAY = 0.5


def whole(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().cpu() for n, v in values.items()}


def on_the_host(s: Session) -> None:
    """Clips, averages, and loads sharded states on the way; one step has a gradient that is not finite."""
    model = s.start(make_gpt(depth=2), offload_policy=CPUOffloadPolicy(pin_memory=False))
    if s.reference:
        mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        mean.update_parameters(model)  # begins with the present weights
    else:
        mean = dmuon.Ema(model, DECAY)
        assert {p.device.type for p in model.parameters()} == {"cpu", TEST_DEVICE}
    for step in range(3):
        s.backward(language_loss(step, s.size), 0.5)
        s.backward(language_loss(10 + step, s.size), 0.5)
        s.clip(0.3)
        s.step()
        mean.update_parameters(model) if s.reference else mean.update()
        if not s.reference:
            (model(batch(step)).sum() * torch.inf).backward()
            s.step()  # is skipped
            model_state, states = get_state_dict(model, s.opt)
            set_state_dict(model, s.opt, model_state_dict=model_state, optim_state_dict=states)
    s.notes.append(whole(dict(mean.module.named_parameters()) if s.reference else mean.state_dict()["weights"]))
    s.notes.append(s.initial)


def from_the_meta_device(mesh: Any, device: str) -> nn.Module:
    with torch.device("meta"):
        model = make_gpt(depth=2)
    dedicate(model, mesh, AHEAD)
    shard(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    model.to_empty(device=device)
    numbers = make_gpt(depth=2).state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(numbers[name])
    return model


def from_shards(mesh: Any) -> nn.Module:
    model = make_gpt(depth=2)
    shard(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    dedicate(model, mesh, AHEAD)
    return model


def from_the_host(mesh: Any, start: Callable[..., nn.Module], **options: Any) -> dict[str, torch.Tensor]:
    """Two steps of a model whose matrices are on the host before Muon."""
    rank, size = place_of(mesh)
    model = start(mesh, **options)
    opt = dmuon.Muon(model, LR, WEIGHT_DECAY, ns_dtype=torch.float32)
    for step in range(2):
        language_loss(step, size)(model, rank).backward()
        opt.step()
        opt.zero_grad()
    return weights_of(model)


def with_some_on_the_host(mesh: Any) -> dict[str, torch.Tensor]:
    """Two clipped steps of a model whose first block alone has its norms and biases on the host."""
    rank, size = place_of(mesh)
    model = make_gpt(depth=2)
    dedicate(model, mesh, AHEAD)
    for block, policy in zip(model.blocks, (CPUOffloadPolicy(pin_memory=False), OffloadPolicy()), strict=True):
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh)
    opt = dmuon.Muon(model, LR, WEIGHT_DECAY, ns_dtype=torch.float32)
    for step in range(2):
        language_loss(step, size)(model, rank).backward()
        dmuon.clip_grad_norm_(model, 0.3)
        opt.step()
        opt.zero_grad()
    return weights_of(model)


def two_clipped_steps(s: Session) -> None:
    s.start(make_gpt(depth=2))
    for step in range(2):
        s.backward(language_loss(step, s.size))
        s.clip(0.3)
        s.step()


@pytest.mark.parametrize("mesh", [(2, 2), (4,)])
def test_a_part_of_adamws_parameters_may_be_on_the_host(ranks, mesh):
    initial, expected, _ = run_scenario(None, two_clipped_steps, AHEAD, math.prod(mesh))
    for weights in ranks.run(with_some_on_the_host, mesh):
        assert_equal_to_reference(initial, expected, weights)


def two_steps(s: Session) -> None:
    s.start(make_gpt(depth=2))
    s.train(0, 1)


@pytest.mark.parametrize(
    "options", [{"start": from_the_meta_device, "device": "cpu"}, {"start": from_shards}], ids=["meta", "shards"]
)
@pytest.mark.parametrize("mesh", [(2, 2), (1,)])
def test_owners_take_first_values_from_the_host(ranks, mesh, options):
    initial, expected, _ = run_scenario(None, two_steps, AHEAD, math.prod(mesh))
    for weights in ranks.run(from_the_host, mesh, **options):
        assert_equal_to_reference(initial, expected, weights)


@pytest.mark.skipif(TEST_DEVICE == "cpu", reason="the host is the device")
def test_fsdp2_must_find_on_the_host_what_it_keeps_there(ranks):
    options = {"start": from_the_meta_device, "device": TEST_DEVICE}
    for message in ranks.run(attempt, (2, 2), program=from_the_host, options=options):
        assert "Muon: model: 'embedding.weight' is on emulated" in message
        assert "fully_shard has CPUOffloadPolicy. Expected: model.to_empty(device='cpu')" in message


def scaled(mesh: Any) -> None:
    rank, size = place_of(mesh)
    model = from_shards(mesh)
    opt = dmuon.Muon(model, LR, WEIGHT_DECAY, ns_dtype=torch.float32)
    scaler = torch.amp.GradScaler(mesh.device_type)
    scaler.scale(language_loss(0, size)(model, rank)).backward()
    scaler.step(opt)


@pytest.mark.skipif(TEST_DEVICE == "cpu", reason="torch copies the factor to the host at once there")
def test_a_scaler_whose_factor_may_arrive_late_is_refused(ranks):
    for message in ranks.run(attempt, (2, 2), program=scaled, options={}):
        assert "GradScaler with parameters on the host" in message and "Expected: bfloat16" in message


def test_training_and_the_mean_are_those_of_one_process(ranks):
    *notes, (*norms, expected, initial) = check(ranks, on_the_host, schedule=AHEAD)
    for *found, mean, _ in notes:
        torch.testing.assert_close(found, norms, rtol=1e-4, atol=0.0)
        assert_equal_to_reference(initial, expected, mean)
