"""Under tensor parallelism a model is trained as on one process that has it whole."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from pool import own_random_numbers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from tp_models import (
    Llama,
    OnRanks,
    loss_of,
    make_model,
    meshes,
    parallelize,
    tokens,
    trained_alone,
    whole,
    worst_error,
)
from training import KEPT_NO_COPY, LR, ON_DEMAND, WEIGHT_DECAY, dedicate

import dmuon

STEPS = 3
MOST = 0.3  # of the gradients' norm: less than any here


@functools.cache
def alone(parts: int, micros: int, max_norm: float, sizes: tuple[tuple[str, Any], ...]) -> Any:
    return trained_alone(make_model(**dict(sizes)), parts, STEPS, micros, max_norm)


def checkpoint(model: nn.Module) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)


def compile_blocks(model: nn.Module) -> None:
    torch._dynamo.reset()  # PyTorch cannot trace DTensors with sizes that changed from one test to the next
    for block in model.blocks:
        block.compile(backend="aot_eager")


def clip_by_torch(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), MOST)


def clip_by_dmuon(model: nn.Module) -> Any:
    return dmuon.clip_grad_norm_(model, MOST)


def train(mesh: DeviceMesh, dims: tuple[int, ...], micros: int, clip: Any, run: dict[str, Any]) -> Any:
    ranks = OnRanks(mesh.device_type, dims, **run)
    ranks.run(STEPS, micros, clip)
    owners = {row.name: row.owner for row in dmuon.routing_table(ranks.model)}
    with dmuon.full_params(ranks.model):
        full = {name: p.detach().clone() for name, p in ranks.model.named_parameters()}
    return ranks.saved(), full, owners


@pytest.mark.parametrize(
    ("dims", "micros", "clip", "run"),
    [
        ((2, 2), 1, None, {}),
        ((1, 4), 1, None, {"options": ON_DEMAND}),
        ((4, 1), 1, clip_by_torch, {}),
        ((1, 2, 2), 2, clip_by_dmuon, {"options": KEPT_NO_COPY}),
        ((2, 1, 2), 2, None, {"options": {"strategy": "round_robin"}}),
        ((2, 2), 1, clip_by_dmuon, {"sequence": False, "gate": True}),
        ((2, 2), 1, clip_by_torch, {"shards_first": True}),
        ((2, 2), 2, clip_by_dmuon, {"shards": False}),
        ((1, 4), 1, None, {"shards": False, "sequence": False}),
        ((2, 2), 2, None, {"prepare": checkpoint}),
        ((2, 2), 1, clip_by_dmuon, {"prepare": compile_blocks}),
        ((2, 2), 1, None, {"prepare": compile_blocks, "sequence": False, "shards_first": True}),
        ((2, 2), 1, None, {"kv": 4, "options": {"sync_from_rank0": True}}),
    ],
)
def test_is_trained_as_on_one_process(ranks, dims, micros, clip, run):
    sizes = tuple((key, run[key]) for key in ("kv", "gate") if key in run)
    before, expected, most_error = alone(math.prod(dims[:-1]), micros, MOST if clip else 0.0, sizes)
    for saved, full, owners in ranks.run(train, (4,), dims=dims, micros=micros, clip=clip, run=run):
        assert worst_error(before, expected, saved) <= most_error
        for name, weight in full.items():
            assert torch.equal(weight, saved[name.replace("_checkpoint_wrapped_module.", "")]), name
        assert len({owner for owner in owners.values() if owner is not None}) > 1


def initialise(model: nn.Module) -> None:
    torch.manual_seed(7)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.2)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)


@own_random_numbers()
def from_meta(mesh: DeviceMesh, dims: tuple[int, ...], shards: bool) -> tuple[bool, float]:
    """In torchtitan's order: parallelize, checkpoint, dedicate, shard, to_empty, initialise.

    Returns whether the first values are one process's, and the error after some steps, 1 being the largest allowed.
    """
    data, tensor = meshes(dims, mesh.device_type)
    with torch.device("meta"):
        model = Llama(kv=4)
    parallelize(model, tensor)
    checkpoint(model)
    dedicate(model, data, {})
    if shards:
        for block in model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    model.to_empty(device=mesh.device_type)
    initialise(model)
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    plain = Llama(kv=4)
    initialise(plain)

    def saved() -> dict[str, torch.Tensor]:
        found = model.state_dict()
        return {name.replace("_checkpoint_wrapped_module.", ""): whole(value) for name, value in found.items()}

    first, expected = saved(), {name: p.detach().clone() for name, p in plain.named_parameters()}
    equal = all(torch.equal(first[name], value) for name, value in expected.items())
    before, moved, most_error = trained_alone(plain, data.size(), STEPS)
    part = data.mesh.flatten().tolist().index(torch.distributed.get_rank())
    for step in range(STEPS):
        loss_of(model, tokens(step, part)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return equal, worst_error(before, moved, saved()) / most_error


@pytest.mark.parametrize(("dims", "shards"), [((2, 2), True), ((1, 2, 2), True), ((1, 4), False)])
def test_a_start_on_the_meta_device_draws_one_process_values(ranks, dims, shards):
    for equal, error in ranks.run(from_meta, (4,), dims=dims, shards=shards):
        assert equal
        assert error <= 1
