"""Who holds what: an owner alone holds state, and a rank what its plan says, as the engine and PyTorch count it.

The engine counts all but Newton-Schulz; with an allocator that counts that too: test_device_memory.py.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn as nn
from accounting import BYTES, FP32, MESHES, STRATEGIES, Counted, Sizes, allocations, covering, layout, train
from torch.profiler import ProfilerActivity, profile, record_function
from training import AHEAD, dedicate

import dmuon

LOOKAHEAD = AHEAD["lookahead"]


@pytest.mark.parametrize(
    ("mesh", "strategy", "dtypes", "lookahead", "node_copy"),
    covering(
        MESHES,
        [
            *((dtypes, lookahead, True) for dtypes in BYTES for lookahead in (0, 2)),
            ("bfloat16", 1, True),
            ("bfloat16, reduced in float32", 9, True),
            ("bfloat16, reduced in float32", 2, False),
            ("float32", 1, False),
        ],
    ),
)
def test_owners_alone_hold_state_and_a_rank_what_the_plan_says(ranks, mesh, strategy, dtypes, lookahead, node_copy):
    results = ranks.run(train, mesh, strategy=strategy, dtypes=dtypes, lookahead=lookahead, node_copy=node_copy)
    sizes = Sizes(results[0], mesh)
    weight, gradient = BYTES[dtypes]

    # Each leaf's master, momentum and accumulator once over the mesh, at its owner.
    for leaf, elements in enumerate(results[0]["elements"]):
        for slot, result in enumerate(results):
            expected = FP32 * elements if slot == result["owner"][leaf] else 0
            assert result["owned"][leaf] == [expected] * 3, f"slot {slot}, leaf {leaf}"
    for slot, result in enumerate(results):
        assert result["master_storage"] == FP32 * sizes.owned(slot)
        assert result["momenta"] == [slot == owner for owner in result["owner"]]
    assert sum(result["master_storage"] for result in results) == FP32 * sum(results[0]["elements"])

    largest = max(sizes.unit(unit) for unit in range(sizes.num_units))
    for slot, result in enumerate(results):
        node_copies = weight * sizes.held_column(slot) if sizes.num_replicates > 1 and node_copy else 0
        kept = node_copies + 3 * FP32 * sizes.owned(slot)
        bound = kept + (lookahead + 2) * largest * (weight + gradient) + gradient * sizes.node_mean()
        peaks = [stats["peak_bytes"] for stats in result["stats"][1:]]
        assert max(peaks) <= bound, f"slot {slot}"
        # The first step is traced; the second finds what that has left, which a third may fit in better.
        assert max(peaks[1:]) == pytest.approx(result["planned"], rel=0), f"slot {slot}: {peaks}"
        assert min(peaks[1:]) > kept, f"slot {slot}: {peaks}"


ROWS, COLS, DEPTH = 160, 128, 8  # a device gives out blocks of 512 bytes, of which a row is one


def saving(mesh: Any) -> tuple[int, int]:
    """Bytes that the state dicts of a model and of Muon at most take on the way, and hold."""
    with Counted(mesh.device_type) as counted:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(COLS, ROWS, bias=False) for _ in range(DEPTH)))
        dedicate(model, mesh, AHEAD)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        before = optimizer.stats()
        with counted.during("measured"):
            saved = [model.state_dict(), optimizer.state_dict()]
        assert optimizer.stats()["current_bytes"] == before["current_bytes"]
    del saved
    return counted.found()["measured"]


@pytest.mark.parametrize("mesh", [(1, 4), (1, 3), (2, 2), (4, 1), (1,)])
def test_state_dicts_take_eight_bytes_an_element_of_the_shards(ranks, mesh):
    for rank, (largest, held) in enumerate(ranks.run(saving, mesh)):
        rows = len(torch.arange(ROWS).chunk(mesh[-1])[rank % mesh[-1]])
        shards = 2 * FP32 * DEPTH * rows * COLS  # weights, momentum
        assert abs(held - shards) <= FP32 * COLS, f"rank {rank}"
        # Between nodes, what column members hold on the way: of all matrices, as these are less than 64 MB.
        passing = FP32 * DEPTH * ROWS * COLS if mesh[0] > 1 and len(mesh) > 1 else 0
        assert largest <= shards + passing + FP32 * COLS, f"rank {rank}"


def measure(mesh: Any, strategy: str, width: int = 160, depth: int = 4) -> dict[str, Any]:
    """A step of a model of nearly nothing but matrices, two a unit, as PyTorch's allocator sees it."""
    gc.collect()  # what an earlier case left must not be freed while this one is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2))) for _ in range(depth))
        )
        dedicate(model, mesh, AHEAD, strategy=strategy)
        optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        x = torch.ones(1, width)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer._runtime.engine.reset_peak()
        with record_function("measured"):
            model(x).sum().backward()
            optimizer._runtime.engine.settle()
        stats = optimizer.stats()
    largest, last = allocations(profiler, "measured")
    return {**layout(optimizer), "largest": largest, "last": last, "stats": stats}


@pytest.mark.cpu("PyTorch's profiler sees no other allocator; test_device_memory.py asks that of a device")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_allocator_sees_what_the_engine_counts(ranks, mesh, strategy):
    results = ranks.run(measure, mesh, strategy=strategy)
    sizes = Sizes(results[0], mesh)
    matrix = FP32 * max(results[0]["elements"])
    unit = FP32 * max(sizes.unit(index) for index in range(sizes.num_units))
    # Activations of one row are small beside matrices of 160 x 160.
    slack = matrix // 6
    for slot, result in enumerate(results):
        node_copies = FP32 * sizes.held_column(slot) if sizes.num_replicates > 1 else 0
        kept = node_copies + 3 * FP32 * sizes.owned(slot)
        # Beside the engine autograd computes one matrix's gradient, which it then adds to the packed buffer.
        beside = result["largest"] - result["stats"]["peak_bytes"]
        assert -slack <= beside <= matrix + slack, f"slot {slot}"
        assert abs(result["last"] - result["stats"]["current_bytes"]) <= slack, f"slot {slot}"
        bound = kept + 2 * (LOOKAHEAD + 2) * unit + FP32 * sizes.node_mean()
        assert result["largest"] <= bound + slack, f"slot {slot}"
