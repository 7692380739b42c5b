"""What owners begin with."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dmuon._running.runtime import Runtime
from dmuon._saving.owned_shards import MASTER
from dmuon._setup.groups import verdict_group
from dmuon._setup.meta_start import MetaStart


def take_first_values(runtime: Runtime, meta_start: MetaStart | None) -> None:
    """Owners take their masters from where the values are: on every rank, in its shards, or at one. Collective.

    What has no values yet is zero, and is to be loaded before the first forward.
    """
    initial = {} if meta_start is None else meta_start.values
    parameters = {i: matrix.parameter for i, matrix in enumerate(runtime.matrices) if i not in initial}
    runtime.shards.take({i: p for i, p in parameters.items() if isinstance(p, DTensor)}, MASTER)
    for index, matrix in enumerate(runtime.matrices):
        if meta_start is not None and index in initial:
            _take_initial_values(runtime, meta_start, index)
        elif not isinstance(matrix.parameter, DTensor):
            runtime.engine.scatter(index, MASTER, matrix.parameter.detach())
        matrix.parameter = runtime.placeholders[index]  # only the owner keeps values from here on


def _take_initial_values(runtime: Runtime, meta_start: MetaStart, index: int) -> None:
    """From the rank that has kept them, if anything has been written; over the host, one matrix at a time."""
    values, ranks = meta_start.values[index], runtime.ranks
    here, owner = ranks.everyone[ranks.slot], ranks.everyone[runtime.plan.owner[index]]
    own = meta_start.taken(index)
    if not values.is_written:
        runtime.shards.without_values.add(index)
        own = torch.zeros(values.base.shape, dtype=values.base.dtype, device="cpu") if here == owner else None
    elif here != owner and own is not None:
        dist.send(own.cpu().contiguous(), owner, group=verdict_group(ranks))
    elif here == owner and own is None:
        own = torch.empty(values.base.shape, dtype=values.base.dtype, device="cpu")
        dist.recv(own, values.holder, group=verdict_group(ranks))
    if here == owner:
        assert own is not None
        runtime.engine.scatter(index, MASTER, own)
