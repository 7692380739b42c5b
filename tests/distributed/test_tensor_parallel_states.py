"""States under tensor parallelism are those of stock FSDP2 + TP, and go to any other mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from tp_models import Llama, OnRanks, loss_of, make_model, meshes, parallelize, tokens, whole, worst_error

import dmuon

SIZES = {"kv": 4}


def stock(mesh: DeviceMesh, dims: tuple[int, ...]) -> Llama:
    """The same model under FSDP2 and TP alone."""
    data, tensor = meshes(dims, mesh.device_type)
    model = make_model(**SIZES)
    parallelize(model, tensor)
    for block in model.blocks:
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    return model


def forms(mesh: DeviceMesh, dims: tuple[int, ...], shards_first: bool) -> list[tuple[str, Any, Any]]:
    """What differs between the two state dicts."""
    ours = OnRanks(mesh.device_type, dims, shards_first=shards_first, **SIZES)
    theirs = stock(mesh, dims).state_dict()
    found = ours.model.state_dict()
    different: list[tuple[str, Any, Any]] = [] if list(found) == list(theirs) else [("keys", list(found), list(theirs))]

    def form(tensor: Any) -> Any:
        return type(tensor).__name__, tensor.placements, tensor.device_mesh, tensor.shape, tensor.stride(), tensor.dtype

    for name, tensor in theirs.items():
        if form(found[name]) != form(tensor):
            different.append((name, str(form(found[name])), str(form(tensor))))
        if not torch.equal(found[name].to_local(), tensor.to_local()):
            different.append((name, found[name].to_local(), tensor.to_local()))
    ours.run(1)
    _, optimizer = get_state_dict(ours.model, ours.optimizer)
    for name, state in optimizer["state"].items():
        moment = state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"]
        if form(moment) != form(theirs[name]):
            different.append((name, str(form(moment)), str(form(theirs[name]))))
    return different


@pytest.mark.parametrize(
    ("dims", "shards_first"), [((2, 2), False), ((2, 2), True), ((1, 2, 2), False), ((4, 1), False), ((1, 4), False)]
)
def test_states_have_the_form_and_bits_of_fsdp2_and_tp(ranks, dims, shards_first):
    for different in ranks.run(forms, (4,), dims=dims, shards_first=shards_first):
        assert different == []


# (data ranks, ranks of a slot); the batch is that of 4 data ranks everywhere.
PLACES = [(2, 2), (4, 1), (1, 4), (2, 1, 2), (1, 2, 2), (4,)]


def four_parts(ranks: OnRanks, step: int) -> None:
    share = 4 // ranks.parts
    for number in range(share):
        (loss_of(ranks.model, tokens(step, ranks.part * share + number)) / share).backward()
    ranks.optimizer.step()
    ranks.optimizer.zero_grad()


def on_other_meshes(mesh: DeviceMesh, path: str) -> dict[str, Any]:
    first = OnRanks(mesh.device_type, (2, 2), **SIZES)
    before = first.saved()
    for step in range(2):
        four_parts(first, step)
    model, optimizer = get_state_dict(first.model, first.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    full = get_model_state_dict(first.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    at = first.saved()
    for step in range(2, 4):
        four_parts(first, step)
    expected = first.saved()
    found: dict[str, Any] = {"full": all(torch.equal(full[n], at[n].cpu()) for n in full)}
    for dims in PLACES:
        other = OnRanks(mesh.device_type, dims, seed=5, **SIZES)
        model, optimizer = get_state_dict(other.model, other.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(other.model, other.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        loaded = other.saved()
        equal = all(torch.equal(loaded[name], weight) for name, weight in at.items())
        for step in range(2, 4):
            four_parts(other, step)
        found[str(dims)] = equal, worst_error(before, expected, other.saved())
    plain = stock(mesh, (2, 2))
    model = plain.state_dict()
    dcp.load({"model": model}, checkpoint_id=path)
    found["stock"] = all(torch.equal(whole(model[name]), weight) for name, weight in at.items())
    dist.barrier()
    return found


def test_a_checkpoint_goes_to_other_meshes_and_to_stock(ranks, tmp_path):
    results = ranks.run(on_other_meshes, (4,), path=str(tmp_path / "checkpoint"))
    assert len(list(Path(tmp_path / "checkpoint").iterdir())) == 5
    for found in results:
        assert found.pop("full")
        assert found.pop("stock")
        for dims, (equal, error) in found.items():
            assert equal, dims
            assert error <= 1e-5, dims


def whole_tensors(mesh: DeviceMesh) -> dict[str, bool]:
    """Whole tensors load on every rank; means and weights are the same everywhere."""
    one = OnRanks(mesh.device_type, (2, 2), **SIZES, sequence=False, gate=True)  # the gate is whole on all ranks
    ema = dmuon.Ema(one.model, 0.5)
    one.run(1)
    ema.update()
    one.run(1, first=1)
    kept = one.saved()
    means = {name: whole(tensor) for name, tensor in ema.state_dict()["weights"].items()}
    with dmuon.whole_states(one.model):
        written = one.model.state_dict()
    one.run(1, first=2)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(one.model, {name: weight.clone() for name, weight in kept.items()}, options=options)
    with ema.applied():
        applied = one.saved()
    streamed = {name: weight.clone() for name, weight in dmuon.iter_full_params(one.model)}
    verified = dmuon.verify(one.model, one.optimizer)
    norms = dmuon.weight_norms(one.model)
    return {
        "loads": all(torch.equal(value, one.saved()[name]) for name, value in kept.items()),
        "means": all(torch.equal(applied[name], mean) for name, mean in means.items()),
        "first rank's": dist.get_rank() > 0 or all(torch.equal(value, kept[name]) for name, value in written.items()),
        "streamed": all(torch.equal(streamed[name], value) for name, value in one.saved().items()),
        "norms": all(torch.allclose(norm, kept[name].norm(), rtol=1e-5) for name, norm in norms.items()),
        "verify": verified.ok,
    }


def test_whole_values_come_and_go(ranks):
    for found in ranks.run(whole_tensors, (4,)):
        assert all(found.values()), found
