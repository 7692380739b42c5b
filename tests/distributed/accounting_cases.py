"""What ranks hold and send while they train; run on the ranks of a pool."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.nn as nn
from models import batch, loss_of, make_gpt, part
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile, record_function
from trajectory_cases import place_of, shard

import dmuon

DTYPES = {
    "float32": (None, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16, reduced in float32": (torch.bfloat16, torch.float32),
}


LOOKAHEAD = 2
RESHARD = {"reshard_after_forward": True}


def layout(optimizer: dmuon.Muon) -> dict[str, Any]:
    """The facts that figures are computed from: each matrix's elements, owner and unit."""
    runtime = optimizer._runtime
    unit_of = {matrix: index for index, unit in enumerate(runtime.units) for matrix in unit.matrices}
    return {
        "elements": [matrix.shape.numel() for matrix in runtime.matrices],
        "owner": list(optimizer.plan.owner),
        "unit": [unit_of[index] for index in range(len(runtime.matrices))],
    }


def owned_bytes(optimizer: dmuon.Muon) -> list[list[int]]:
    """[matrices] bytes of (master, momentum, gradient) that this rank holds of each."""
    runtime = optimizer._runtime
    return [
        [
            0 if tensor is None else tensor.numel() * tensor.element_size()
            for tensor in (runtime.state.master(i), runtime.state.momentum(i), runtime.state.gradient(i))
        ]
        for i in range(len(runtime.matrices))
    ]


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def train(
    mesh: Any,
    strategy: str,
    dtypes: str,
    node_copy: bool = True,
    lookahead: int = 2,
    steps: int = 3,
    micro_steps: int = 1,
) -> dict[str, Any]:
    """Trains and returns the counters of each step beside what they are compared with."""
    compute, reduce = DTYPES[dtypes]
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    model = make_gpt(width=32, hidden=56, depth=3)
    schedule = {"node_copy": node_copy, "lookahead": lookahead, **RESHARD}
    dmuon.dedicate_params(model, mesh, mp_policy=policy, strategy=strategy, **schedule)
    shard(model, mesh, mp_policy=policy)
    optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
    rank, size = place_of(mesh)
    stats = [optimizer.stats()]
    for step in range(steps):
        optimizer._runtime.engine.reset_peak()
        for micro in part(batch(step), rank, size).chunk(micro_steps):
            loss_of(model, micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer._runtime.engine.drain()  # what is on its way counts
        stats.append(optimizer.stats())
    runtime = optimizer._runtime
    state = [runtime.state.master(i) for i in range(len(runtime.matrices))]
    return {
        **layout(optimizer),
        "owned": owned_bytes(optimizer),
        "master_storage": storage_bytes([tensor for tensor in state if tensor is not None]),
        "momenta": [len(optimizer.state[p]) > 0 for p in runtime.placeholders],
        "stats": stats,
    }


def allocations(profiler: profile, mark: str) -> tuple[int, int]:
    """(largest, last) number of bytes that were allocated, and not freed, inside the range `mark`."""
    kineto = profiler.profiler.kineto_results
    events = sorted(kineto.events(), key=lambda event: event.start_ns())
    (span,) = (event for event in events if event.name() == mark)
    live = largest = last = 0
    for event in events:
        if event.name() != "[memory]" or event.start_ns() > span.end_ns():
            continue
        live += event.nbytes()
        if event.start_ns() >= span.start_ns():
            largest = max(largest, live)
        last = live
    return largest, last


def measure(mesh: Any, strategy: str, width: int = 160, depth: int = 4) -> dict[str, Any]:
    """A step of a model of nearly nothing but matrices, two a unit, as PyTorch's allocator sees it."""
    gc.collect()  # what an earlier case left must not be freed while this one is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2))) for _ in range(depth))
        )
        dmuon.dedicate_params(model, mesh, strategy=strategy, lookahead=LOOKAHEAD, node_copy=True, **RESHARD)
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
