"""What owners begin with."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dmuon._running.runtime import Runtime
from dmuon._saving.owned_shards import MASTER
from dmuon._setup.dedication import Dedication
from dmuon._setup.groups import verdict_group
from dmuon._setup.meta_start import MetaStart


def take_first_values(runtime: Runtime, dedication: Dedication) -> None:
    """Owners take their masters from where the values are: on every rank, in its shards, or at one. Collective.

    What has no values yet is zero, and is to be loaded before the first forward.
    """
    meta_start, syncs = dedication.meta_start, dedication.across_ranks.sync_from_rank0
    initial = {} if meta_start is None else meta_start.values
    sharded = {
        index: leaf.parameter
        for index, leaf in enumerate(runtime.leaves)
        if index not in initial and leaf.num_columns == 1 and isinstance(leaf.parameter, DTensor)
    }
    runtime.shards.take(sharded, MASTER)
    for index, leaf in enumerate(runtime.leaves):
        if meta_start is not None and index in initial:
            _take_initial_values(runtime, meta_start, index)
        elif leaf.num_columns > 1:
            _take_from_column(runtime, index, first=syncs)
        elif isinstance(leaf.parameter, DTensor):
            pass  # taken above
        elif syncs:
            _take_from(runtime, index, runtime.ranks.everyone[0], leaf.parameter.detach())
        else:
            runtime.engine.scatter(index, MASTER, leaf.parameter.detach())
        leaf.parameter = runtime.placeholders[index]  # only the owner keeps values from here on
    if syncs:
        _take_plain_parameters(runtime)


def _take_initial_values(runtime: Runtime, meta_start: MetaStart, index: int) -> None:
    """From the rank that has kept them, if anything has been written."""
    values = meta_start.values[index]
    own = meta_start.taken(index)
    if values.is_written:
        _take_from(runtime, index, values.holder, own)
        return
    runtime.shards.without_values.add(index)
    for *_, own in runtime.engine.owned_parts(index, MASTER):
        own.zero_()


def _take_from_column(runtime: Runtime, index: int, first: bool) -> None:
    """Owners take what they have of their experts, or what the first rank of their column has."""
    leaf, ranks = runtime.leaves[index], runtime.ranks
    local = leaf.local().reshape(-1)
    if first and ranks.num_replicates > 1:
        group, values = verdict_group(ranks), local.cpu().contiguous()
        for member in ranks.column[1:]:
            if ranks.replicate == 0:
                dist.send(values, member, group=group)
            elif ranks.column[ranks.replicate] == member:
                dist.recv(values, ranks.column[0], group=group)
        local = values
    origin = ranks.shard * local.numel()
    for _, begin, end, master in runtime.engine.owned_parts(index, MASTER):
        master.view(-1).copy_(local[begin - origin : end - origin])


def _take_from(runtime: Runtime, index: int, holder: int, own: torch.Tensor | None) -> None:
    """Owners take what `holder`, a global rank, has; over the host, one part of a leaf at a time."""
    ranks, leaf = runtime.ranks, runtime.leaves[index]
    here, group = ranks.here, verdict_group(ranks)
    masters = {part: master for part, _, _, master in runtime.engine.owned_parts(index, MASTER)}
    end = 0
    for part in runtime.parts[index]:
        item, owner = runtime.plan.native.inventory[part], ranks.everyone[runtime.plan.owner[part]]
        sizes = item.num_matrices, item.rows, item.cols
        begin, end = end, end + math.prod(sizes)
        if here == holder:
            assert own is not None
            values = own.reshape(-1)[begin:end]
            if here != owner:
                dist.send(values.cpu().contiguous(), owner, group=group)
        elif here == owner:
            values = torch.empty(math.prod(sizes), dtype=leaf.parameter.dtype, device="cpu")
            dist.recv(values, holder, group=group)
        if here == owner:
            masters[part].view(-1).copy_(values)


def _take_plain_parameters(runtime: Runtime) -> None:
    """All ranks take the first one's values of what neither dmuon nor fully_shard manages; over the host."""
    group = verdict_group(runtime.ranks)
    for parameter in runtime.plain_parameters if group is not None else ():
        values = parameter.detach().cpu().contiguous()
        dist.broadcast(values.view(-1).view(torch.uint8), runtime.ranks.everyone[0], group=group)  # any dtype
        parameter.detach().copy_(values)
