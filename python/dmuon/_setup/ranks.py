"""The ranks of a mesh as rows and columns, this rank's place among them, and those that share its matrices."""

from __future__ import annotations

import dataclasses
import datetime
import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon import _plan


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
    device_index: int | None = None  # the model's, as far as it is known; None: the current device

    @property
    def device(self) -> torch.device:
        """Where this rank's messages are: with the model, also in a program that sets no current device."""
        return torch.device(
            self.device_type if self.device_index is None else f"{self.device_type}:{self.device_index}"
        )

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


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Raises a ValueError, unless the mesh has one dimension, or two whose rows FSDP2 shards alike."""
    if mesh is None:
        return
    if mesh.mesh.ndim not in (1, 2):
        raise ValueError(
            f"dedicate_params: mesh: expected 1 dimension (shard) or 2 (replicate, shard), got {mesh.mesh.ndim}; "
            "pass the data-parallel part of the mesh, e.g. mesh['replicate', 'shard']"
        )
    for name in mesh.mesh_dim_names or ():
        if name in ("tp", "pp") or name.startswith(("tensor", "pipeline")):
            raise ValueError(
                f"dedicate_params: mesh: expected the data-parallel part of the mesh, e.g. mesh['dp'], got one with "
                f"the dimension '{name}'"
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


def backends() -> dict[str, str]:
    """Returns the backend of each device type that the default process group serves."""
    pairs = (item.partition(":") for item in dist.get_backend_config().split(","))
    return {device: backend for device, _, backend in pairs}
