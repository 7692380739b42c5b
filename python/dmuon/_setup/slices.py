"""Slices of tensor parallelism: how a tensor lies on the ranks that share it, and what one of them has."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


@dataclasses.dataclass(frozen=True)
class Slices:
    """How a leaf lies on the ranks of a tensor-parallel mesh: each has a slice, or all of them have all of it."""

    mesh: DeviceMesh  # 1-D
    placement: Placement
    shape: torch.Size  # of the whole leaf
    stride: tuple[int, ...]

    @property
    def cut(self) -> tuple[int, int] | None:
        """The dimension that is cut, and how many equal blocks of it are cut by themselves. None for no cut."""
        if self.placement.is_replicate() or self.mesh.size() == 1:
            return None
        placement: Any = self.placement  # no class has all kinds of shards
        return placement.dim, getattr(placement, "split_factor", 1)

    def as_dtensor(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the leaf as a DTensor of which this rank has `local`. Shares its memory."""
        made: torch.Tensor = DTensor.from_local(
            local, self.mesh, (self.placement,), run_check=False, shape=self.shape, stride=self.stride
        )
        return made

    def gathered(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the whole of a tensor that is cut as the leaf is. Collective over the mesh."""
        if self.cut is None:
            return local
        whole: torch.Tensor = self.as_dtensor(local).full_tensor()  # type: ignore[attr-defined]
        return whole

    def of_rank(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns a rank's slice of a tensor that is cut as the leaf is."""
        if self.cut is None:
            return whole
        dim, factor = self.cut
        return _slice(whole, dim, factor, self.mesh.size(), rank)

    def of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns this rank's slice of a gradient, a DTensor that may lie otherwise. May be collective over the mesh.

        DTensor leaves the sum over ranks open where a layer's inputs are sharded.
        """
        return local_of(gradient, (self.placement,))

    def __str__(self) -> str:
        return f"{self.placement} on ranks {self.mesh.mesh.tolist()}"


def ends_of_slices(size: int, parts: int) -> list[int]:
    """Returns where each part but the last ends, as DTensor chunks a dimension."""
    chunk = -(-size // parts)
    return [min(size, chunk * part) for part in range(1, parts)]


def _slice(whole: torch.Tensor, dim: int, factor: int, parts: int, rank: int) -> torch.Tensor:
    """Returns a rank's part of a dimension that is cut into `parts`, in each of `factor` equal blocks by itself."""
    blocks = whole.chunk(factor, dim)
    slices = [block.tensor_split(ends_of_slices(block.shape[dim], parts), dim)[rank] for block in blocks]
    return slices[0] if factor == 1 else torch.cat(slices, dim)


def cut_as(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """Returns this rank's part of a whole tensor, cut as a DTensor is. Sends nothing.

    FSDP2 cuts what tensor parallelism has left of a tensor, so the last dimension of the mesh cuts first. Both give
    parts to ranks in the order of their groups, which ascends in whatever order the mesh has them.
    """
    part, num_cuts = whole, [1] * whole.ndim
    for dim in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[dim]
        if placement.is_replicate():
            continue
        size, along = like.device_mesh.size(dim), placement.dim
        # FSDP2's own factor says how often the dimension is cut already.
        factor = getattr(placement, "split_factor", 1) if num_cuts[along] == 1 else 1
        part = _slice(part, along, factor, size, like.device_mesh.get_group(dim).rank())
        num_cuts[along] *= size
    return part


def other_cut(value: DTensor, like: Any) -> str | None:
    """Returns what is wrong if a DTensor is not cut as another one, else None."""
    if (value.device_mesh, value.placements) == (like.device_mesh, like.placements):
        return None
    return (
        f"expected a DTensor with {like.placements} on {like.device_mesh}, got one with {value.placements} on "
        f"{value.device_mesh}"
    )


def cut_like(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a whole `value`, cut as `other` is if that is a DTensor. Sends nothing."""
    if isinstance(value, DTensor) or not isinstance(other, DTensor):
        return value
    cut: torch.Tensor = DTensor.from_local(
        cut_as(value, other).contiguous(),
        other.device_mesh,
        other.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )
    return cut


def cuts_experts(shape: Sequence[int], placement: Placement) -> bool:
    """True if a placement cuts a tensor as expert parallelism cuts a stack [experts, rows, cols]."""
    return len(shape) == 3 and placement == Shard(0)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor."""
    detached: Any = tensor.detach()
    part: torch.Tensor = detached.to_local() if isinstance(tensor, DTensor) else detached
    return part


@torch.no_grad()
def local_of(gradient: Any, placements: Collection[Placement]) -> torch.Tensor:
    """Returns this rank's part of a DTensor by these placements, which need not be its own."""
    if tuple(gradient.placements) != tuple(placements):
        gradient = gradient.redistribute(placements=tuple(placements))
    local: torch.Tensor = gradient.to_local()
    # An AsyncCollectiveTensor has no memory of its own.
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def placements_with(slices: Slices | None, ndim: int) -> list[Placement]:
    """Returns the placements of a leaf on its mesh, of `ndim` data-parallel dimensions and that of `slices`.

    FSDP2 cuts slices along their first dimension, after tensor parallelism.
    """
    shard: Placement = Shard(0)
    over_slices = [] if slices is None else [slices.placement]
    if slices is not None and slices.cut is not None and slices.cut[0] == 0:
        shard = _StridedShard(0, split_factor=slices.mesh.size())
    return [Replicate()] * (ndim - 1) + [shard, *over_slices]


def joined_meshes(data: DeviceMesh, tensor: DeviceMesh) -> DeviceMesh:
    """Returns the mesh of both, as FSDP2 makes it."""
    if hasattr(DeviceMesh, "_concatenate"):
        mesh: DeviceMesh = DeviceMesh._concatenate([data, tensor])
        return mesh
    from torch.distributed.device_mesh import _mesh_resources  # before 2.10

    root = _mesh_resources.get_root_mesh(data)
    return root[(*(data.mesh_dim_names or ()), *(tensor.mesh_dim_names or ()))]
