"""What ranks hold and send while they train, and the layout from which tests compute what they should.

c(u, j) elements of unit u lie in column j of an R x G mesh, and p(u, s) at the owner of slot s: each leaf fills
aligned elements of a packed buffer, and so of what travels.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from dmuon._setup.placeholder import OwnedTensor
from models import batch, loss_of, make_gpt, part
from pool import TEST_DEVICE
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile, record_function
from training import dedicate, place_of, shard

import dmuon

STRATEGIES = ("load_balance", "round_robin", "rank0")
MESHES = ((4,), (2, 2))
DTYPES = {
    "float32": (None, None),
    "bfloat16": (torch.bfloat16, None),
    "bfloat16, reduced in float32": (torch.bfloat16, torch.float32),
}
# Bytes of an element of weights and of gradients on the wire.
BYTES = {"float32": (4, 4), "bfloat16": (2, 2), "bfloat16, reduced in float32": (2, 4)}
FP32 = 4
ALIGNED = 128


class Sizes:
    """Elements of each unit's buffers by column and by owner, from the layout that a rank reported."""

    def __init__(self, facts, mesh):
        self.num_replicates, self.num_shards = mesh if len(mesh) == 2 else (1, mesh[0])
        self.num_slots = self.num_replicates * self.num_shards
        self.num_units = max(facts["unit"]) + 1
        self.leaves = list(zip(facts["elements"], facts["owner"], facts["unit"], strict=True))

    def part(self, unit, slot):
        return sum(-(-n // ALIGNED) * ALIGNED for n, owner, u in self.leaves if (owner, u) == (slot, unit))

    def column(self, unit, column):
        return sum(self.part(unit, slot) for slot in range(column, self.num_slots, self.num_shards))

    def unit(self, unit):
        return sum(self.column(unit, column) for column in range(self.num_shards))

    def node_mean(self):
        """What stage 2 of two routes sends at most, and their inboxes."""
        if self.num_replicates == 1:
            return 0
        return 4 * max(self.column(u, column) for u in range(self.num_units) for column in range(self.num_shards))

    def owned(self, slot):
        return sum(n for n, owner, _ in self.leaves if owner == slot)

    def held_column(self, slot):
        return sum(self.column(unit, slot % self.num_shards) for unit in range(self.num_units))


def bytes_of_norms(num_parameters, num_ranks, num_members):
    """What a step's agreement sends over a lane of so many members: on a device norms are not of the hosts' message."""
    return 8 * (num_parameters + 2 * num_ranks) if TEST_DEVICE != "cpu" and num_members > 1 else 0


def covering(meshes, options):
    """Every mesh with every row of options; a third of them with each strategy, every mesh with every strategy."""
    pairs = itertools.product(meshes, options)
    return [(mesh, STRATEGIES[i % len(STRATEGIES)], *row) for i, (mesh, row) in enumerate(pairs)]


def layout(optimizer: dmuon.Muon) -> dict[str, Any]:
    """The facts that figures are computed from: each leaf's elements, owner and unit."""
    runtime = optimizer._runtime
    unit_of = {leaf: index for index, unit in enumerate(runtime.units) for leaf in unit.leaves}
    return {
        "elements": [leaf.shape.numel() for leaf in runtime.leaves],
        "owner": list(optimizer.plan.owner),
        "unit": [unit_of[index] for index in range(len(runtime.leaves))],
    }


def owned_bytes(optimizer: dmuon.Muon) -> list[list[int]]:
    """[leaves] bytes of (master, momentum, gradient) that this rank holds of each."""
    runtime = optimizer._runtime
    return [
        [
            sum(part.tensor.nbytes for part in runtime.transfers.owned_parts(i, name))
            for name in ("master", "momentum_buffer", "gradient")
        ]
        for i in range(len(runtime.leaves))
    ]


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


class Counted:
    """Bytes of tensors by name of what was done: the most at once, beyond what was there before; and what stayed."""

    def __init__(self, device_type: str) -> None:
        self._on_device = device_type != "cpu"
        self._device: dict[str, tuple[int, int]] = {}
        self._names: list[str] = []
        activities = [ProfilerActivity.CPU]
        self._profiler = profile(activities=activities, profile_memory=True)

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        gc.collect()
        self._names.append(name)
        if not self._on_device:
            with record_function(f"before {name}"):
                pass
            with record_function(name):
                yield
            return
        import async_device

        torch.emulated.synchronize()
        before = torch.emulated.memory_allocated()
        with async_device.phase(name):
            yield
            torch.emulated.synchronize()
        peak = async_device.statistics()[name]["peak_bytes"]
        self._device[name] = (peak - before, torch.emulated.memory_allocated() - before)

    def __enter__(self) -> Counted:
        gc.collect()
        if self._on_device:
            import async_device

            async_device.reset_statistics()
        else:
            self._profiler.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        if not self._on_device:
            self._profiler.__exit__(*raised)

    def found(self) -> dict[str, tuple[int, int]]:
        if self._on_device:
            return self._device
        found = {}
        for name in self._names:
            before = allocations(self._profiler, f"before {name}")[1]
            found[name] = tuple(value - before for value in allocations(self._profiler, name))
        return found


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def train(
    mesh: Any,
    strategy: str,
    dtypes: str,
    node_copy: bool,
    lookahead: int,
    steps: int = 3,
    micro_steps: int = 1,
    replicated: bool = False,
) -> dict[str, Any]:
    """Trains and returns the counters of each step beside what they are compared with."""
    compute, reduce = DTYPES[dtypes]
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    model = make_gpt(width=32, hidden=56, depth=3)
    schedule = {"node_copy": node_copy, "lookahead": lookahead, "reshard_after_forward": True}
    dedicate(model, mesh, schedule, mp_policy=policy, strategy=strategy, replicated=replicated)
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
    state = [part.tensor for i in range(len(runtime.leaves)) for part in runtime.transfers.owned_parts(i, "master")]
    planned = optimizer.plan.native.memory[rank]
    return {
        **layout(optimizer),
        "planned": planned.state + planned.node_copy + planned.buffers,
        "owned": owned_bytes(optimizer),
        "master_storage": storage_bytes(state),
        "momenta": [not isinstance(optimizer.state[p]["momentum_buffer"], OwnedTensor) for p in runtime.placeholders],
        "stats": stats,
    }
