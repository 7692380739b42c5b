"""The ranks of a mesh, dmuon's private process groups over them, and agreement at set-up."""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon import _C

logger = logging.getLogger("dmuon")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The mesh as R replicates (rows) of G shards (columns) of global ranks, and this rank's place in it."""

    rows: tuple[tuple[int, ...], ...]
    replicate: int
    shard: int
    device_type: str
    timeout: datetime.timedelta | None
    mesh_rows: tuple[tuple[int, ...], ...]  # the mesh as given; a 1-D one is one row even where it spans hosts

    @property
    def host_replicates(self) -> int:
        """How many replicas the host framework keeps of its parameters."""
        return len(self.mesh_rows)

    def as_one_node(self) -> Ranks:
        """The same ranks in one row."""
        return dataclasses.replace(self, rows=(self.everyone,), replicate=0, shard=self.slot)

    @property
    def num_replicates(self) -> int:
        """R, the number of nodes."""
        return len(self.rows)

    @property
    def num_shards(self) -> int:
        """G, the number of ranks of a node."""
        return len(self.rows[0])

    @property
    def size(self) -> int:
        """R * G."""
        return self.num_replicates * self.num_shards

    @property
    def slot(self) -> int:
        """This rank's slot, as plans count them."""
        return self.replicate * self.num_shards + self.shard

    @property
    def everyone(self) -> tuple[int, ...]:
        """Global ranks by slot."""
        return tuple(rank for row in self.rows for rank in row)

    @property
    def row(self) -> tuple[int, ...]:
        """Global ranks of this node."""
        return self.rows[self.replicate]

    @property
    def column(self) -> tuple[int, ...]:
        """Global ranks of this shard index."""
        return tuple(row[self.shard] for row in self.rows)


def rows_of(table: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """A mesh's table of ranks as rows; a 1-D one is one row."""
    return tuple(tuple(int(rank) for rank in row) for row in table.reshape(-1, table.shape[-1]))


def resolve_ranks(
    mesh: DeviceMesh | None, device_type: str, timeout: datetime.timedelta | None
) -> tuple[Ranks, str | None]:
    """The ranks of `mesh`, and what is wrong with it, if anything: all its ranks can then say so together.

    None means all ranks of the default process group, or this process alone where there is none. A 1-D mesh that
    spans hosts (LOCAL_WORLD_SIZE) has a row for each, so that weights and gradients travel in two stages.
    """
    if mesh is None:
        if not dist.is_initialized():
            return Ranks(((0,),), 0, 0, device_type, timeout, ((0,),)), None
        world = (tuple(range(dist.get_world_size())),)
        local_size = _level_and_compare([dist.group.WORLD], device_type)
        return _placed(world, local_size, device_type, timeout), None
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"dedicate_params: mesh: expected a DeviceMesh or None, got {type(mesh).__name__}")
    problem = None
    table = mesh.mesh
    if table.ndim not in (1, 2):
        problem = (
            f"dedicate_params: mesh: expected 1 dimension (shard) or 2 (replicate, shard), got {table.ndim}; "
            "pass the data-parallel part of the mesh, e.g. mesh['replicate', 'shard']"
        )
        table = table.flatten()
    rows = rows_of(table)
    if (here := dist.get_rank()) not in table.flatten().tolist():
        raise ValueError(f"dedicate_params: mesh: expected a mesh that holds this rank ({here}), got {rows}")
    local_size = _level_and_compare([mesh.get_group(dim) for dim in range(mesh.mesh.ndim)], mesh.device_type)
    return _placed(rows, local_size, mesh.device_type, timeout), problem


def _placed(
    mesh_rows: tuple[tuple[int, ...], ...], local_size: int, device_type: str, timeout: datetime.timedelta | None
) -> Ranks:
    rows = _hosts(mesh_rows[0], local_size) if len(mesh_rows) == 1 else mesh_rows
    here = dist.get_rank()
    replicate, shard = next((r, row.index(here)) for r, row in enumerate(rows) if here in row)
    return Ranks(rows, replicate, shard, device_type, timeout, mesh_rows)


def _hosts(row: tuple[int, ...], local_size: int) -> tuple[tuple[int, ...], ...]:
    """A row by host, where it holds equally many of each, more than one, and they follow each other."""
    if local_size <= 1:
        return (row,)
    hosts: dict[int, list[int]] = {}
    for rank in row:
        hosts.setdefault(rank // local_size, []).append(rank)
    blocks = tuple(tuple(block) for block in hosts.values())
    even = len({len(block) for block in blocks}) == 1 and len(blocks[0]) > 1
    return blocks if even and tuple(rank for block in blocks for rank in block) == row else (row,)


_groups: dict[tuple[Any, ...], dist.ProcessGroup] = {}


def _level_and_compare(groups: Sequence[dist.ProcessGroup | None], device_type: str) -> int:
    """Prepares all ranks of the mesh for new groups, and says how many ranks a host has; 0 where hosts differ.

    Makes `new_group(use_local_synchronization=True)` give one name on all of them: PyTorch hashes into that name how
    many groups the process knows, and waits for ever where ranks know different numbers (a rank of its own group, say).
    Groups of one rank, which cost nothing, make up the difference.
    """
    names = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_names", {})
    local_size = _local_world_size()
    words = torch.tensor([len(names), local_size, -local_size], device=device_type)
    for group in groups:
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
    most, largest, minus_smallest = words.tolist()
    if not names:
        logger.warning(
            "dmuon: this PyTorch does not show how many process groups it knows; if ranks of a mesh know different "
            "numbers, creating ours waits until the timeout"
        )
    for _ in range(most - len(names)):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return largest if largest == -minus_smallest else 0


def _local_world_size() -> int:
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() else 0


def _usable(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


def _group(purpose: str, members: tuple[int, ...], ranks: Ranks, host: bool) -> dist.ProcessGroup | None:
    """One group a purpose, mesh and process; creating it involves its members only."""
    if len(members) == 1:
        return None
    key = (purpose, members, ranks.rows, ranks.device_type, ranks.timeout)
    group = _groups.get(key)
    # A process group that was destroyed (between two runs in one process) is of no use.
    if group is None or not _usable(group):
        group = dist.new_group(
            list(members),
            timeout=ranks.timeout,
            backend="gloo" if host else None,
            use_local_synchronization=True,
            group_desc=f"dmuon {purpose}",
        )
        _groups[key] = group
    return group


def row_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """The ranks of this node; None where it is one rank alone."""
    return _group("row", ranks.row, ranks, host=False)


def column_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """The ranks of this shard index over all nodes; None where it is one rank alone."""
    return _group("column", ranks.column, ranks, host=False)


def _verdict_group(ranks: Ranks) -> dist.ProcessGroup | None:
    return _group("verdict", ranks.everyone, ranks, host=True)


# With the groups themselves: while they are held, no other group has their ids.
_engine_groups: dict[tuple[int, ...], tuple[_C.Groups, tuple[Any, ...]]] = {}


@atexit.register
def _leave() -> None:
    """Ends what lanes still wait for: a rank that failed must not stay, silent, until its peers' timeouts."""
    for groups, _ in _engine_groups.values():
        groups.leave(grace_ms=3000)
    _engine_groups.clear()


def engine_groups(ranks: Ranks) -> _C.Groups:
    """The four groups of an engine, created in one order on every rank; models on one mesh share them."""
    verdict = _verdict_group(ranks)
    order = _group("order", ranks.everyone, ranks, host=True)
    row, column = row_group(ranks), column_group(ranks)
    key = (ranks.slot, *(id(group) for group in (verdict, order, row, column)))
    if key not in _engine_groups:
        made = _C.Groups(
            row=_C.Group(row, "row", ranks.shard, ranks.num_shards),
            column=_C.Group(column, "column", ranks.replicate, ranks.num_replicates),
            order=_C.Group(order, "mesh (order)", ranks.slot, ranks.size),
            verdict=_C.Group(verdict, "mesh (verdict)", ranks.slot, ranks.size),
        )
        _engine_groups[key] = (made, (verdict, order, row, column))
    return _engine_groups[key][0]


def all_gather(ranks: Ranks, value: T) -> list[T]:
    """The value of every rank, by slot. Collective."""
    group = _verdict_group(ranks)
    if group is None:
        return [value]
    values: list[Any] = [None] * ranks.size
    dist.all_gather_object(values, value, group=group)
    return values


def described(error: Exception) -> str:
    """The message of an error for all ranks; ours speak for themselves."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def from_first(ranks: Ranks, make: Callable[[], T]) -> T:
    """What `make` returns at slot 0. Collective; if it raises there, every rank raises ValueError."""
    value: T | None = None
    problem: str | None = None
    if ranks.slot == 0:
        try:
            value = make()
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            problem = described(error)
    received = all_gather(ranks, (value, problem))[0]
    if received[1] is not None:
        raise ValueError(received[1])
    return received[0]  # type: ignore[return-value]


def agree_or_raise(
    ranks: Ranks, where: str, problem: str | None, facts: Sequence[str], cause: BaseException | None = None
) -> None:
    """Raises ValueError on every rank if any rank has a problem or the facts differ. Collective.

    Args:
        ranks: the mesh.
        where: the function, for messages.
        problem: this rank's own error message, or None.
        facts: one line each; equal on every rank if all is well.
        cause: what the problem came from, to be shown with it.
    """
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    answers = all_gather(ranks, (problem, digest))
    if problem is not None:
        raise ValueError(problem) from cause
    for slot, (other, _) in enumerate(answers):
        if other is not None:
            raise ValueError(f"{other} (on rank {ranks.everyone[slot]})")
    if all(answer[1] == digest for answer in answers):
        return
    lines = all_gather(ranks, list(facts))
    for slot, theirs in enumerate(lines):
        for place in range(max(len(lines[0]), len(theirs))):
            first = lines[0][place] if place < len(lines[0]) else "nothing"
            other_line = theirs[place] if place < len(theirs) else "nothing"
            if first != other_line:
                raise ValueError(
                    f"{where}: ranks differ. Expected: the same model and options on every rank. "
                    f"Rank {ranks.everyone[0]} has: {first}; rank {ranks.everyone[slot]} has: {other_line}"
                )


def default_device_type(parameters: Sequence[torch.Tensor]) -> str:
    """Where the model lies or will lie, for a mesh that is not given."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return "cuda"
    return parameters[0].device.type if parameters else "cpu"
