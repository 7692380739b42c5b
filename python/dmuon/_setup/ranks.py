"""The ranks of a mesh as rows and columns, this rank's place among them, and those that share its matrices."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import logging
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from dmuon import _plan
from dmuon._setup.shown import listed

logger = logging.getLogger("dmuon")

_SLOW_S = 10.0  # as the engine's own watch
_RANKS_NAMED = 8
_num_calls: Counter[tuple[int, ...]] = Counter()  # calls of dedicate_params, by the ranks of the mesh


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The mesh as R replicates (rows) of G shards (columns) of global ranks, and this rank's place in it.

    The ranks of a row ascend, and so do the first ranks of rows, in whatever order the mesh has them: FSDP2 counts the
    shards of a row in this order too. With tensor parallelism each slot has T ranks, and each of these has a mesh of
    its own, of the ranks that have the same slices.
    """

    rows: tuple[tuple[int, ...], ...]  # those with this rank's slices
    slot: int  # this rank's, as plans count them: by rows
    device_type: str
    timeout: datetime.timedelta | None
    mesh_rows: tuple[tuple[int, ...], ...]  # the mesh in its own order: a 1-D mesh is one row even if it spans hosts
    mesh_groups: tuple[dist.ProcessGroup, ...] = ()  # of its dimensions; the host framework uses them
    tensor_mesh: DeviceMesh | None = None  # 1-D, of tensor parallelism
    slots: tuple[tuple[int, ...], ...] = ()  # the T ranks of each slot; () without tensor parallelism

    @property
    def host_replicates(self) -> int:
        """Number of replicas that the host framework has of its parameters."""
        return len(self.mesh_rows)

    def as_one_node(self) -> Ranks:
        """Returns the same ranks in one row."""
        return dataclasses.replace(self, rows=(self.by_slot,))

    @functools.cached_property
    def shape(self) -> _plan.Mesh:
        """The mesh without its ranks; computes with slots and owners."""
        return _plan.Mesh(len(self.rows), len(self.rows[0]), self.tensor_parallel)

    @property
    def tensor_parallel(self) -> int:
        """T, the number of ranks of a slot."""
        return len(self.slots[0]) if self.slots else 1

    @property
    def tensor_rank(self) -> int:
        """This rank's number among those of its slot."""
        return self.slots[self.slot].index(self.by_slot[self.slot]) if self.slots else 0

    @property
    def owner(self) -> int:
        """This rank's number in `everyone`, as plans count owners."""
        return self.slot * self.tensor_parallel + self.tensor_rank

    @property
    def replicate(self) -> int:
        """This rank's row."""
        return self.shape.replicate_of(self.owner)

    @property
    def shard(self) -> int:
        """This rank's column."""
        return self.shape.shard_of(self.owner)

    @property
    def num_replicates(self) -> int:
        """R, the number of nodes."""
        return self.shape.num_replicates

    @property
    def num_shards(self) -> int:
        """G, the number of ranks of a node."""
        return self.shape.num_shards

    @property
    def num_slots(self) -> int:
        """R * G, the number of ranks that have different data."""
        return self.num_replicates * self.num_shards

    @property
    def size(self) -> int:
        """R * G * T."""
        return self.shape.num_owners()

    @property
    def by_slot(self) -> tuple[int, ...]:
        """Global ranks with this rank's slices, by slot."""
        return tuple(rank for row in self.rows for rank in row)

    @property
    def everyone(self) -> tuple[int, ...]:
        """All global ranks, by owner."""
        return tuple(rank for slot in self.slots for rank in slot) or self.by_slot

    @property
    def slot_members(self) -> tuple[int, ...]:
        """Global ranks of this slot, which have the same data."""
        return self.slots[self.slot] if self.slots else (self.here,)

    @property
    def here(self) -> int:
        """This rank, as the default process group counts it."""
        return self.by_slot[self.slot]

    @property
    def row(self) -> tuple[int, ...]:
        """Global ranks of this node."""
        return self.rows[self.replicate]

    @property
    def column(self) -> tuple[int, ...]:
        """Global ranks of this shard index."""
        return tuple(row[self.shard] for row in self.rows)


def rows_of(table: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Returns a mesh's table of ranks as rows. A 1-D table is one row."""
    return tuple(tuple(int(rank) for rank in row) for row in table.reshape(-1, table.shape[-1]))


def resolve_ranks(
    mesh: DeviceMesh | None,
    model: nn.Module,
    timeout: datetime.timedelta | None,
    find_tensor_mesh: Callable[[Collection[int], int], DeviceMesh | None],
) -> Ranks:
    """Returns the ranks of `mesh`. Collective over the mesh, and over the ranks of tensor parallelism.

    A 1-D mesh that spans hosts (LOCAL_WORLD_SIZE) gets a row for each host, so that weights and gradients travel in two
    stages. Bad arguments do not raise here, so that all ranks can refuse them together (`check_mesh`, `check_timeout`,
    `agreement`). A mesh of more than two dimensions is flattened. A bad timeout, or one that differs between ranks,
    becomes None.

    Args:
        mesh: None means all ranks of the default process group, or this process alone if there is none.
        model: its device is the device of the ranks if `mesh` is None.
        timeout: the timeout of dmuon's process groups.
        find_tensor_mesh: returns the mesh of tensor parallelism, given the ranks of `mesh` and this one.

    Raises:
        ValueError: `mesh` is no mesh, or does not hold this rank. Without a common mesh no other rank can know.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(f"dedicate_params: mesh: expected a DeviceMesh or None, got {type(mesh).__name__}")
    if mesh is None and not dist.is_initialized():
        return Ranks(((0,),), 0, _device_type(model), None, ((0,),))
    mesh_rows: tuple[tuple[int, ...], ...]
    groups: tuple[dist.ProcessGroup, ...]
    if mesh is None:
        mesh_rows = (tuple(range(dist.get_world_size())),)
        device_type, groups = _device_type(model), (dist.distributed_c10d._get_default_group(),)
    else:
        device_type, table = mesh.device_type, mesh.mesh
        mesh_rows = rows_of(table if table.ndim <= 2 else table.flatten())
        groups = tuple(mesh.get_group(dim) for dim in range(table.ndim))
    here = dist.get_rank()
    rows = tuple(sorted(tuple(sorted(row)) for row in mesh_rows))
    everyone = [rank for row in rows for rank in row]
    if here not in everyone:
        raise ValueError(f"dedicate_params: mesh: expected a mesh that holds this rank ({here}), got {mesh_rows}")
    tensor_mesh = find_tensor_mesh(everyone, here)
    slots: tuple[tuple[int, ...], ...] = ()
    with _watched(tuple(everyone)):
        numbers = _local_world_size(), _milliseconds(timeout), 1 if tensor_mesh is None else tensor_mesh.size()
        local_sizes, timeouts, tensor_sizes = _extremes(groups, device_type, numbers)
        if len(rows) == 1 and local_sizes[0] == local_sizes[1]:
            rows = _hosts(rows[0], local_sizes[0])
        if tensor_mesh is not None and 1 < tensor_sizes[0] == tensor_sizes[1]:
            slots = _slots(tensor_mesh, everyone, device_type)
    agreed = datetime.timedelta(milliseconds=timeouts[0]) if 0 < timeouts[0] == timeouts[1] else None
    return Ranks(rows, everyone.index(here), device_type, agreed, mesh_rows, groups, tensor_mesh, slots)


def _slots(mesh: DeviceMesh, by_slot: Sequence[int], device_type: str) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks of each slot, from what each rank of this slot knows of its own slices. Collective over `mesh`.

    Empty, which all ranks will refuse, if they do not know of equally many slots.
    """
    group, own = mesh.get_group(), mesh.mesh.flatten().tolist()
    ((least, most),) = _extremes([group], device_type, [len(by_slot)])
    if least != most:
        return ()
    words = torch.tensor(by_slot, device=device_type)
    found = [torch.empty_like(words) for _ in own]
    dist.all_gather(found, words, group=group)
    by_rank = dict(zip(sorted(own), (one.tolist() for one in found), strict=True))  # groups count by global rank
    return tuple(zip(*(by_rank[rank] for rank in own), strict=True))


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Raises a ValueError, unless the mesh has one dimension, or two whose rows FSDP2 shards alike."""
    if mesh is None:
        return
    if mesh.mesh.ndim not in (1, 2):
        raise ValueError(
            f"dedicate_params: mesh: expected 1 dimension (shard) or 2 (replicate, shard), got {mesh.mesh.ndim}; "
            "pass the data-parallel part of the mesh, e.g. mesh['replicate', 'shard']"
        )
    rows = rows_of(mesh.mesh)
    if len({tuple(sorted(range(len(row)), key=row.__getitem__)) for row in rows}) > 1:
        raise ValueError(
            f"dedicate_params: mesh: expected rows whose ranks ascend in the same columns, got {rows}: FSDP2 gives a "
            "row's shards to its ranks in ascending order, and would add up different shards of different rows"
        )


def contradicted_by_names(mesh: DeviceMesh | None) -> str | None:
    """Returns the dimensions of a mesh with their roles if a name contradicts its position. FSDP2 goes by position."""
    names = mesh.mesh_dim_names if mesh is not None else None
    if not names:
        return None
    roles = ("replicate", "shard")[-len(names) :]
    others = ("shard", "replicate")[-len(names) :]
    if not any(
        other in name.lower() and role not in name.lower()
        for name, role, other in zip(names, roles, others, strict=True)
    ):
        return None
    return " and ".join(f"'{name}' as {role}" for name, role in zip(names, roles, strict=True))


def check_timeout(timeout: object) -> None:
    """Raises a ValueError, unless it is a positive datetime.timedelta or None."""
    if _milliseconds(timeout) < 0:
        raise ValueError(f"dedicate_params: timeout: expected a positive datetime.timedelta or None, got {timeout!r}")


def _milliseconds(timeout: object) -> int:
    """Returns milliseconds: 0 for None, -1 for a bad timeout."""
    if timeout is None:
        return 0
    if not isinstance(timeout, datetime.timedelta) or timeout.total_seconds() <= 0:
        return -1
    return max(1, timeout // datetime.timedelta(milliseconds=1))


def _extremes(groups: Sequence[dist.ProcessGroup], device_type: str, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the least and the largest of each number over all ranks. `groups` has one for each mesh dimension."""
    words = torch.tensor([*numbers, *(-number for number in numbers)], device=device_type)
    for group in groups:
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
    largest, minus_least = words.view(2, -1).tolist()
    return [(-least, most) for most, least in zip(largest, minus_least, strict=True)]


@contextlib.contextmanager
def _watched(everyone: tuple[int, ...]) -> Iterator[None]:
    """Lets one waiting rank warn of ranks that have not come. Before dmuon has groups, the engine's Watch cannot."""
    store, here = dist.distributed_c10d._get_default_store(), dist.get_rank()
    _num_calls[everyone] += 1
    key = f"dmuon: dedicate_params {zlib.crc32(repr(everyone).encode())} {_num_calls[everyone]}"
    try:
        store.set(f"{key} {here}", "here")
    except RuntimeError:  # the store of torch's fake process groups stores nothing
        yield
        return

    def warn() -> None:
        # A connection of its own: a group's first collective may hold the other connection until all ranks have come.
        own = store.clone() if hasattr(store, "clone") else store
        if own.check([f"{key} {rank}" for rank in everyone]) or own.add(f"{key} warned", 1) != 1:
            return
        if missing := [rank for rank in everyone if not own.check([f"{key} {rank}"])]:
            logger.warning(
                "dmuon: dedicate_params on rank %d has waited for %g s, and waits until the timeout of your process "
                "group: it is collective over its mesh, and has not been called on rank %s.",
                here,
                _SLOW_S,
                listed([*map(str, missing)], _RANKS_NAMED),
            )

    timer = threading.Timer(_SLOW_S, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _hosts(row: tuple[int, ...], local_size: int) -> tuple[tuple[int, ...], ...]:
    """Divides a row by host if each host has equally many ranks, more than one, which follow each other."""
    if local_size <= 1:
        return (row,)
    blocks = tuple(tuple(block) for _, block in itertools.groupby(row, lambda rank: rank // local_size))
    together = len({block[0] // local_size for block in blocks}) == len(blocks)  # no host comes twice
    even = {len(block) for block in blocks} == {len(row) // len(blocks)}
    return blocks if together and even and len(blocks[0]) > 1 else (row,)


def _local_world_size() -> int:
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() else 0


def _device_type(model: nn.Module) -> str:
    """Returns the device type on which the model lies or will lie.

    A model on the CPU or the meta device will be on the accelerator if the default process group has a backend of its
    own for it, as `fully_shard` assumes too. `Muon` refuses a model that stayed elsewhere.
    """
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    if first is not None and first.device.type not in ("cpu", "meta"):
        return first.device.type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not dist.is_initialized():
        return "cpu"
    served = backends()
    own = served.get(accelerator.type)
    return accelerator.type if own is not None and own != served.get("cpu") else "cpu"


def backends() -> dict[str, str]:
    """Returns the backend of each device type that the default process group serves."""
    pairs = (item.partition(":") for item in dist.get_backend_config().split(","))
    return {device: backend for device, _, backend in pairs}
