"""dmuon's private process groups over the ranks of a mesh."""

from __future__ import annotations

import atexit
import ctypes
import datetime
import logging
import math
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from dmuon import _C
from dmuon._setup.new_groups import is_usable, named, new_group, new_host_group
from dmuon._setup.ranks import Ranks, backends

logger = logging.getLogger("dmuon")

_GRACE_S = 3.0  # in which lanes may finish at exit


class _Key(NamedTuple):
    """Names a group in this process. `sides` are the mesh's: replicates, shards, tensor parallelism."""

    purpose: str
    members: tuple[int, ...]
    sides: tuple[int, int, int]
    everyone: tuple[int, ...]
    device_type: str
    timeout: datetime.timedelta | None


class _Shared(NamedTuple):
    """Holds what models on one mesh share, and the groups, so that no new group gets one of their ids."""

    mesh: _C.SharedMesh
    groups: tuple[dist.ProcessGroup | None, ...]
    ranks: Ranks
    others: list[dist.ProcessGroup]  # that `mesh` knows of, in which a host may wait outside of the engine
    users: weakref.WeakSet[Any]  # that live

    def add_others(self, ranks: Ranks) -> None:
        """Adds those of another DeviceMesh over the same ranks, and those that were made since."""
        for group in _other_groups(ranks):
            if group not in self.others:
                name = f"other {len(self.others)}"
                self.mesh.add_other(_C.Group(group, name, group.rank(), group.size(), ranks.device_type))
                self.others.append(group)


_groups: dict[_Key, dist.ProcessGroup] = {}
_engine_groups: dict[tuple[int, ...], _Shared] = {}
_over: list[_Shared] = []  # of failed trainings; their waits end with the process
_of_parent: list[_Shared] = []  # in a forked child, which has none of their threads


def row_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Returns the group of this node's ranks, or None for one rank alone."""
    return _group("row", ranks.row, ranks, host=False)


def column_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Returns the group of the ranks with this shard index on all nodes, or None for one rank alone."""
    return _group("column", ranks.column, ranks, host=False)


def _column_down_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Returns the column's second group, by which gloo sends to lower ranks; None where the first one carries all."""
    alone = len(ranks.column) == 1
    if alone or ranks.device_type != "cpu" or backends().get("cpu", "gloo") != "gloo":
        return None
    return _group("column down", ranks.column, ranks, host=True)


def slices_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Returns the group of this slot's ranks of tensor parallelism, or None for one rank alone."""
    return _group("slices", ranks.slot_members, ranks, host=False)


def slots_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Returns the group of one rank of each slot, which no lane uses, or None for one rank alone."""
    group = _group("slots", ranks.by_slot, ranks, host=False)
    if (known := _engine_groups.get(_engine_key(ranks))) is not None:
        known.add_others(ranks)
    return group


def made_slots_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Returns that group if it was made, else None."""
    return _made(_key("slots", ranks.by_slot, ranks))


def everyone_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """Returns the group of all ranks for words over the host, or None for one rank alone."""
    return _group("everyone", ranks.everyone, ranks, host=True)


def process_groups(ranks: Ranks) -> tuple[dist.ProcessGroup | None, ...]:
    """Creates the groups of an engine, in one order on every rank. Collective.

    Returns:
        Of weights and gradients: row, column, the column downwards, slices of tensor parallelism; of words over the
        host: row, column, slices, everyone.
    """
    everyone = everyone_group(ranks)

    def over_host(purpose: str, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        return everyone if members == ranks.everyone else _group(purpose, members, ranks, host=True)

    host = (
        over_host("host row", ranks.row),
        over_host("host column", ranks.column),
        over_host("host slices", ranks.slot_members),
    )
    return row_group(ranks), column_group(ranks), _column_down_group(ranks), slices_group(ranks), *host, everyone


def engine_groups(ranks: Ranks, user: Any) -> _C.SharedMesh:
    """Returns what models on one mesh share, to `user`. Waits for no rank once `process_groups` was called.

    A rank alone sends nothing, so its models share nothing, and threads may train one each.
    """
    groups = row, column, down, slices, host_row, host_column, host_slices, everyone = process_groups(ranks)
    _drop_unused()
    key = _engine_key(ranks) if ranks.size > 1 else (id(user),)
    if key not in _engine_groups:

        def over(
            group: dist.ProcessGroup | None,
            name: str,
            members: tuple[int, ...],
            device_type: str,
            down: dist.ProcessGroup | None = None,
        ) -> _C.Group:
            return _C.Group(group, name, members.index(ranks.here), len(members), device_type, _order(members), down)

        made = _C.SharedMesh(
            row=over(row, "row", ranks.row, ranks.device_type),
            column=over(column, "column", ranks.column, ranks.device_type, down),
            host_row=over(host_row, "row over the host", ranks.row, "cpu"),
            host_column=over(host_column, "column over the host", ranks.column, "cpu"),
            everyone=over(everyone, "mesh", ranks.everyone, "cpu"),
            tensor_parallel=_C.TensorParallel(
                over(slices, "slices", ranks.slot_members, ranks.device_type),
                over(host_slices, "slices over the host", ranks.slot_members, "cpu"),
            )
            if ranks.tensor_parallel > 1
            else None,
        )
        _engine_groups[key] = _Shared(made, groups, ranks, [], weakref.WeakSet([user]))
    shared = _engine_groups[key]
    shared.users.add(user)
    shared.add_others(ranks)
    return shared.mesh


def _drop_unused() -> None:
    """Drops groups that were destroyed, between two runs in one process, and meshes that no model can use again."""
    for name in [name for name, group in [*_groups.items()] if not is_usable(group)]:
        _groups.pop(name, None)  # threads may make models of a rank alone at once
    for key, shared in [*_engine_groups.items()]:
        groups = [group for group in shared.groups if group is not None]
        if not shared.users and not (groups and all(map(is_usable, groups))):
            _engine_groups.pop(key, None)
            shared.mesh.release_turn()


def _engine_key(ranks: Ranks) -> tuple[int, ...]:
    return ranks.slot, *map(id, process_groups(ranks))


def _other_groups(ranks: Ranks) -> list[dist.ProcessGroup]:
    """Returns the groups in which a host may wait outside of the engine, for FSDP2, DTensor, gradients or buffers."""
    groups = [*ranks.mesh_groups]
    if ranks.tensor_mesh is not None:
        groups.append(ranks.tensor_mesh.get_group())
    if (slots := made_slots_group(ranks)) is not None:
        groups.append(slots)
    # Waits of another backend on CPUs last until its timeout.
    return [group for group in groups if ranks.device_type != "cpu" or "gloo" in dist.get_backend(group)]


def are_over(members: Sequence[int]) -> bool:
    """Returns True if a training on a mesh of these ranks has failed here, after which its groups are of no use."""
    return any(shared.mesh.failure() for shared in [*_engine_groups.values()] if _is_of(shared.ranks, members))


def forget(members: Sequence[int]) -> None:
    """Forgets the groups of meshes of these ranks, so that the next model makes new ones. All ranks must call it."""
    for key in [key for key, shared in _engine_groups.items() if _is_of(shared.ranks, members)]:
        _over.append(_engine_groups.pop(key))
        mesh, ranks = _over[-1].mesh, _over[-1].ranks
        mesh.release_turn()
        if ranks.device_type == "cpu":  # on devices the mesh's own groups are aborted, and not used again
            mesh.look_away()
        if failure := mesh.failure():  # a late update's may not have been raised yet
            logger.warning("dmuon: dedicate_params replaces groups, because a training has failed: %s", failure)
            mesh.raised()
        for group in [group for group in _groups if group.everyone == ranks.everyone]:
            del _groups[group]


def _is_of(ranks: Ranks, members: Sequence[int]) -> bool:
    return sorted(members) == sorted(rank for row in ranks.mesh_rows for rank in row)


@atexit.register
def _leave() -> None:
    """Ends the waits of lanes at exit, so that a failed rank does not stay silent until its peers' timeouts."""
    end = time.monotonic() + _GRACE_S
    meshes = [shared.mesh for shared in [*_engine_groups.values(), *_over]]
    try:
        for mesh in sorted(meshes, key=lambda mesh: bool(mesh.failure())):  # what has failed takes nobody's time
            if error := mesh.leave(grace_ms=max(0, math.ceil(1000 * (end - time.monotonic())))):
                logger.warning("dmuon: the program has ended before a call could raise an error: %s", error)
    finally:
        _end_user_functions()
    _engine_groups.clear()
    _over.clear()


def _end_user_functions() -> None:
    """Waits until no function of a user's rule runs. Python aborts if a thread comes back to it later."""
    end, has_warned = time.monotonic() + _GRACE_S, False
    while not _C.end_user_functions(most_ms=200):  # in turns, between which Python handles Ctrl-C
        if time.monotonic() > end and not has_warned:
            logger.warning("dmuon: the program ends when a function that dmuon.rules.register was given has returned")
            has_warned = True


def _keep_groups() -> None:
    """Keeps PyTorch's process groups for ever in a forked child: destructors wait for threads that it does not have."""
    for group in {*dist.distributed_c10d._world.pg_map, *_groups.values()}:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _forget_parent() -> None:
    """Lets a forked child make its own lanes. Its parent's live on, because nothing may wait for them."""
    _keep_groups()
    _of_parent.extend([*_engine_groups.values(), *_over])
    _engine_groups.clear()
    _over.clear()


os.register_at_fork(after_in_child=_forget_parent)


def _order(members: tuple[int, ...]) -> list[int]:
    """Returns each member's rank in a process group, which PyTorch counts by global rank; empty if that is the same."""
    order = [sorted(members).index(member) for member in members]
    return [] if order == list(range(len(members))) else order


def _key(purpose: str, members: tuple[int, ...], ranks: Ranks) -> _Key:
    sides = ranks.num_replicates, ranks.num_shards, ranks.tensor_parallel
    return _Key(purpose, members, sides, ranks.everyone, ranks.device_type, ranks.timeout)


def _made(key: _Key) -> dist.ProcessGroup | None:
    group = _groups.get(key)
    # It may have been destroyed, between two runs in one process.
    return group if group is not None and is_usable(group) else None


def _group(purpose: str, members: tuple[int, ...], ranks: Ranks, host: bool) -> dist.ProcessGroup | None:
    """Returns the group of a purpose and mesh in this process. Only its members wait for its creation."""
    if len(members) == 1:
        return None
    key = _key(purpose, members, ranks)
    group = _made(key)
    if group is None:
        make = new_host_group if host else new_group
        with named(key):
            group = _groups[key] = make(purpose, members, ranks)
    return group
