"""dmuon creates its process groups whatever groups the program has created on some ranks only."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch.distributed as dist
from dmuon._setup import groups
from models import make_gpt
from pool import RankPool
from training import AHEAD, dedicate

import dmuon


def create_among_others(mesh: Any) -> list[int]:
    """Creates a group on rank 0 only, then dmuon's twice. Returns PyTorch's count of groups before, between and after.

    The count is part of the name of the next group of all ranks.
    """
    if mesh.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    counts = [dist.distributed_c10d._world.group_count]
    for minutes in (7, 8):  # a timeout has groups of its own
        model = make_gpt(depth=1)
        dedicate(model, mesh, AHEAD, timeout=datetime.timedelta(minutes=minutes))
        dmuon.Muon(model)
        counts.append(dist.distributed_c10d._world.group_count)
    return counts


def purposes(mesh: Any) -> list[str]:
    model = make_gpt(depth=1)
    dedicate(model, mesh, AHEAD)
    dmuon.Muon(model)
    return sorted(group.group_desc.removeprefix("dmuon ") for group in groups._groups.values())


@pytest.mark.cpu("elsewhere than on gloo a column has one group")
@pytest.mark.parametrize(
    "mesh, expected",
    [
        ((2, 2), ["column", "column down", "everyone", "host column", "host row", "row", "slots"]),
        ((1, 4), ["everyone", "row", "slots"]),
    ],
)
def test_the_column_alone_has_a_second_group(mesh, expected):
    pool = RankPool(4)  # which has no groups of other meshes
    try:
        results = pool.run(purposes, mesh)
    finally:
        pool.close()
    assert results == [expected] * 4


@pytest.mark.cpu("names of groups are of no device")
def test_groups_of_some_ranks_only_change_no_names():
    pool = RankPool(4)  # its ranks no longer agree on PyTorch's names
    try:
        results = pool.run(create_among_others, (2, 2))
    finally:
        pool.close()
    assert all(count == before for before, *counts in results for count in counts)
