"""Under tensor parallelism a model is trained as on one process that has it whole."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from default_device import own_random_numbers
from pool import RankPool
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tp_models import (
    Llama,
    OnRanks,
    loss_of,
    make_model,
    meshes,
    parallelize,
    tokens,
    too_far,
    trained_alone,
    whole,
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
        ((2, 2), 1, None, {"shards_first": True, "fsdp": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}),
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
        assert not too_far(before, expected, saved, most_error)
        for name, weight in full.items():
            assert torch.equal(weight, saved[name.replace("_checkpoint_wrapped_module.", "")]), name
        assert len({owner for owner in owners.values() if owner is not None}) > 1


@pytest.fixture(scope="module")
def eight_ranks():
    pool = RankPool(8)
    yield pool
    pool.close()


def test_eight_ranks_train_as_one_process(eight_ranks):
    before, expected, most_error = alone(4, 2, MOST, ())
    results = eight_ranks.run(train, (8,), dims=(2, 2, 2), micros=2, clip=clip_by_dmuon, run={})
    for saved, _, owners in results:
        assert not too_far(before, expected, saved, most_error)
        assert len({owner for owner in owners.values() if owner is not None}) == 8


def initialise(model: nn.Module) -> None:
    torch.manual_seed(7)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=0.2)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)


@own_random_numbers()
def from_meta(mesh: DeviceMesh, dims: tuple[int, ...], shards: bool) -> tuple[bool, dict[str, float]]:
    """In torchtitan's order: parallelize, checkpoint, dedicate, shard, to_empty, initialise.

    Returns whether the first values are one process's, and which errors after some steps are too large.
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
    return equal, too_far(before, moved, saved(), most_error)


@pytest.mark.parametrize(("dims", "shards"), [((2, 2), True), ((1, 2, 2), True), ((1, 4), False)])
def test_a_start_on_the_meta_device_draws_one_process_values(ranks, dims, shards):
    for equal, wrong in ranks.run(from_meta, (4,), dims=dims, shards=shards):
        assert equal
        assert not wrong


def copies(mesh: DeviceMesh) -> str:
    """Under SequenceParallel a plain matrix would see a part of the tokens on each rank."""
    ranks = OnRanks(mesh.device_type, (2, 2), gate=True)
    try:
        ranks.run(2)  # on a device the host learns of it in the step after
    except ValueError as error:
        return str(error)
    return ""


def test_copies_that_would_become_different_are_refused(ranks):
    for words in ranks.run(copies, (4,)):
        assert "'blocks.0.gate.weight' is whole on all ranks of tensor parallelism" in words


def poisoned(mesh: DeviceMesh) -> tuple[bool, int, float]:
    """A NaN in a slice of one rank: all ranks skip the step."""
    ranks = OnRanks(mesh.device_type, (2, 2))
    before = ranks.saved()
    if mesh.get_rank() == 1:
        w1 = ranks.model.blocks[1].feed_forward.w1
        w1.register_forward_hook(lambda module, args, out: out.register_hook(lambda g: g * math.nan) and None)
    ranks.run(1)
    after = ranks.saved()
    skipped = ranks.optimizer.skipped_steps
    return all(torch.equal(after[name], value) for name, value in before.items()), skipped, float(len(after))


def test_a_nan_in_one_slice_skips_the_step_on_all_ranks(ranks):
    for equal, skipped, _ in ranks.run(poisoned, (4,)):
        assert equal
        assert skipped == 1


def poisoned_copy(mesh: DeviceMesh) -> tuple[bool, int]:
    """A NaN in what one rank has of a gradient that all ranks of its slot have."""
    ranks = OnRanks(mesh.device_type, (2, 2), sequence=False, shards=False)
    before = ranks.saved()
    loss_of(ranks.model, tokens(0, ranks.part)).backward()
    if mesh.get_rank() == 3:
        ranks.model.norm.weight.grad.fill_(math.nan)
    ranks.optimizer.step()
    after = ranks.saved()
    return all(torch.equal(after[name], value) for name, value in before.items()), ranks.optimizer.skipped_steps


def test_a_nan_in_one_copy_skips_the_step_on_all_ranks(ranks):
    for equal, skipped in ranks.run(poisoned_copy, (4,)):
        assert equal
        assert skipped == 1


def changed(mesh: DeviceMesh, how: str) -> tuple[bool, torch.Tensor]:
    """A module changes a weight of its own in its forward."""
    ranks = OnRanks(mesh.device_type, (2, 2))
    ranks.run(1)
    before, w1 = ranks.saved(), ranks.model.blocks[0].feed_forward.w1

    def change(module: nn.Module, args: Any) -> None:
        weight: Any = module.weight
        with torch.no_grad():
            if how == "in place":
                weight.mul_(1.5)
            elif how == "copied":
                weight.copy_(weight * 1.5)
            else:
                weight.to_local().mul_(1.5)

    handle = w1.register_forward_pre_hook(change)
    with torch.no_grad():
        ranks.model(tokens(0, ranks.part))
    handle.remove()
    after, name = ranks.saved(), "blocks.0.feed_forward.w1.weight"
    others = all(torch.equal(after[other], value) for other, value in before.items() if other != name)
    return others, after[name] / before[name]


@pytest.mark.parametrize("how", ["in place", "copied", "of the slice"])
def test_a_weight_that_its_module_changes_stays_so(ranks, how):
    for others, ratio in ranks.run(changed, (4,), how=how):
        assert others
        assert torch.allclose(ratio, torch.tensor(1.5))


def other_tokens(mesh: DeviceMesh) -> str:
    """The ranks of a group have data of their own. (A cut embedding would add them up.)"""
    data, tensor = meshes((2, 2), mesh.device_type)
    model = make_model()
    for block in model.blocks:
        parallelize_module(
            block.feed_forward, tensor, {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
        )
    for block in model.blocks:  # whose gradients would differ too
        block.attention.requires_grad_(False)
    dedicate(model, data, {})
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=data)
    optimizer = dmuon.Muon(model)
    try:
        for step in range(2):
            loss_of(model, tokens(step, mesh.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
    except ValueError as error:
        with pytest.raises(ValueError, match="is whole on all ranks of tensor parallelism"):
            optimizer.step()  # does not use what the first message has agreed
        return str(error)
    return ""


def test_ranks_of_a_group_with_other_data_are_refused(ranks):
    for words in ranks.run(other_tokens, (4,)):
        assert "Expected: the same data on all ranks of a group" in words
