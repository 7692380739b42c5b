"""Checks that whole weights are equal on all ranks, because ranks would else train a mixture."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._setup.agreement import all_gather
from dmuon._setup.checksum import checksum
from dmuon._setup.dedication import Dedication
from dmuon._setup.groups import everyone_group
from dmuon._setup.place import clean_name
from dmuon._setup.ranks import Ranks
from dmuon._setup.shown import listed
from dmuon._setup.tensor_parallel import is_sharded

_NAMED = 3  # parameters in a message
_RANKS_NAMED = 8  # of each

Checksums = dict[str, torch.Tensor | None]  # [] by the parameter's name; None if this rank does not have its values

_NOT_HERE = torch.iinfo(torch.int64).min


def checksums(model: nn.Module, dedication: Dedication) -> Checksums:
    """Returns checksums of the values that every rank has whole. Sends nothing.

    Covers leaves, and parameters that no fully_shard manages, frozen ones too. For a model that was built on the meta
    device, ranks compare the history of each parameter instead (`MetaStart.facts`): values that nobody has initialised
    yet differ between ranks.
    """
    if dedication.ranks.size == 1 or dedication.across_ranks.sync_from_rank0:
        return {}
    found = {leaf.name: leaf.parameter for leaf in dedication.leaves if not leaf.parameter.is_meta}
    if dedication.meta_start is None:
        found |= {clean_name(name): p for name, p in model.named_parameters()}
    ranks, sums = dedication.ranks, Checksums()
    for name, p in found.items():
        if not isinstance(p, DTensor):
            sums[name] = checksum(p)
        elif p.device_mesh == ranks.tensor_mesh and p.placements[0].is_replicate():
            sums[name] = checksum(p.to_local())
        elif p.device_mesh == ranks.tensor_mesh:
            for number in range(ranks.tensor_parallel):
                sums[f"{name} of slice {number}"] = checksum(p.to_local()) if number == ranks.tensor_rank else None
    shard = ranks.shard
    for leaf in dedication.leaves if ranks.tensor_parallel > 1 else ():
        compares = is_sharded(leaf.parameter, ranks) and leaf.cut is None and not leaf.parameter.is_meta
        for slot in range(ranks.num_slots) if compares else ():
            sums[f"{leaf.name} of shard {slot}"] = checksum(leaf.local()) if slot == ranks.slot else None
    for leaf in dedication.leaves if ranks.num_replicates > 1 else ():
        for column in range(leaf.num_columns) if leaf.num_columns > 1 else ():
            sums[f"{leaf.name} of column {column}"] = checksum(leaf.local()) if column == shard else None
    return {name: None if value is None else value.cpu() for name, value in sums.items()}


def require_same_values(ranks: Ranks, found: Checksums) -> None:
    """Compares checksums. Collective, one message over the host, unless `found` is empty.

    Raises:
        ValueError: on all ranks, if values differ between ranks.
    """
    if not found:
        return
    absent = torch.tensor(_NOT_HERE, device="cpu")
    sums = torch.stack([absent if value is None else value for value in found.values()])
    complements = torch.stack([absent if value is None else ~value for value in found.values()])
    words = torch.cat([sums, complements])  # the complement reverses the order and never overflows
    dist.all_reduce(words, dist.ReduceOp.MAX, group=everyone_group(ranks))
    largest, least = words[: len(sums)], ~words[len(sums) :]
    differing = (largest != least).nonzero().flatten()
    if not len(differing):
        return
    first = differing[:_NAMED].tolist()
    of_all = all_gather(ranks, sums[first].tolist())  # by slot
    names = list(found)
    named = []
    for place, index in enumerate(first):
        here = {rank: own[place] for rank, own in zip(ranks.everyone, of_all, strict=True) if own[place] != _NOT_HERE}
        others = [rank for rank, own in here.items() if own != next(iter(here.values()))]
        named.append(f"'{names[index]}' (on ranks {listed([*map(str, others)], _RANKS_NAMED)})")
    named += ["more"] if len(differing) > _NAMED else []
    raise ValueError(
        f"Muon: model: {len(differing)} of {len(found)} parameters have other values than on the first rank that has "
        f"them, so that what is trained would be a mixture: {', '.join(named)}. "
        "Expected: the same values on every rank, by one seed or a checkpoint that every rank loads. Or "
        "dedicate_params(sync_from_rank0=True), which takes the first rank's: where it alone has loaded a checkpoint, "
        "or where values are to be loaded after Muon."
    )
