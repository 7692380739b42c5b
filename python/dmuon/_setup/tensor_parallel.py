"""Tensor parallelism: which ranks share matrices with this one, and which slices of a leaf they have."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dmuon._setup.ranks import Ranks


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
        blocks = whole.chunk(factor, dim)
        of_blocks = [block.tensor_split(_ends(block.shape[dim], self.mesh.size()), dim)[rank] for block in blocks]
        return of_blocks[0] if factor == 1 else torch.cat(of_blocks, dim)

    def of_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns this rank's slice of a gradient, a DTensor that may lie otherwise. May be collective over the mesh.

        DTensor leaves the sum over ranks open where a layer's inputs are sharded.
        """
        return local_of(gradient, (self.placement,))

    def __str__(self) -> str:
        return f"{self.placement} on ranks {self.mesh.mesh.tolist()}"


def _ends(size: int, parts: int) -> list[int]:
    """Returns where each part but the last ends, as DTensor chunks a dimension."""
    chunk = -(-size // parts)
    return [min(size, chunk * part) for part in range(1, parts)]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what this rank has of a tensor."""
    detached: Any = tensor.detach()
    part: torch.Tensor = detached.to_local() if isinstance(tensor, DTensor) else detached
    return part


def is_sliced(parameter: Any, ranks: Ranks) -> bool:
    """True if the ranks of a slot have different parts of a DTensor, which `fully_shard` may have cut too."""
    mesh: DeviceMesh = parameter.device_mesh
    over_slices = mesh == ranks.tensor_mesh or mesh.ndim > len(ranks.mesh_groups)
    return over_slices and not parameter.placements[-1].is_replicate()


@torch.no_grad()
def local_of(gradient: Any, placements: Collection[Placement]) -> torch.Tensor:
    """Returns this rank's part of a DTensor by these placements, which need not be its own."""
    if tuple(gradient.placements) != tuple(placements):
        gradient = gradient.redistribute(placements=tuple(placements))
    local: torch.Tensor = gradient.to_local()
    # An AsyncCollectiveTensor has no memory of its own.
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def spec_of(parameter: Any, managed: Any = None) -> Any:
    """Returns mesh and placements of a DTensor as tensor parallelism made it, None of other tensors.

    `managed`: what `fully_shard` has made of the parameter, if it manages it.
    """
    if managed is not None:  # before 2.13 PyTorch has another name
        return getattr(managed, "_unsharded_dtensor_spec", None) or getattr(managed, "_tp_spec", None)
    return parameter._spec if isinstance(parameter, DTensor) else None


def is_over_tensor_parallel(mesh: DeviceMesh, data_ranks: Collection[int], here: int) -> bool:
    """True if the ranks of a mesh have this rank alone in common with the data-parallel mesh."""
    return mesh.ndim == 1 and set(mesh.mesh.flatten().tolist()) & set(data_ranks) == {here}


def slices_of(name: str, spec: Any, function: str) -> Slices:
    """Returns how a leaf lies.

    Raises:
        ValueError: the sum over ranks is open. Names `function`.
    """
    (placement,) = spec.placements
    if not isinstance(placement, Replicate | Shard | _StridedShard):
        raise ValueError(
            f"{function}: model: '{name}' has placement {placement} over its tensor-parallel ranks: its values are an "
            "open sum. Expected: Shard or Replicate; redistribute it before."
        )
    return Slices(spec.mesh, placement, torch.Size(spec.shape), tuple(spec.stride))


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


def check_joined(mesh: DeviceMesh | None, tensor_mesh: DeviceMesh | None) -> None:
    """Raises ValueError if the two meshes are not parts of one, which names all its dimensions."""
    if mesh is None or tensor_mesh is None:
        return
    try:
        joined_meshes(mesh, tensor_mesh)
    except Exception as error:
        raise ValueError(
            f"dedicate_params: mesh: {mesh} and the mesh of tensor parallelism, {tensor_mesh}, are not parts of one "
            "mesh with names. Expected: mesh = init_device_mesh(..., mesh_dim_names=('data', 'tensor')), of which "
            "parallelize_module takes mesh['tensor'], dedicate_params and fully_shard mesh['data']."
        ) from error


def check_slices(name: str, slices: Slices, parameter: Any, ranks: Ranks) -> None:
    """Raises ValueError if a rank has nothing of a leaf, or if the leaf cannot be saved as FSDP2 would save it."""
    who = f"dedicate_params: model: '{name}' is divided by tensor parallelism: {slices}"
    if slices.cut is not None and slices.cut[0] == 0 and slices.cut[1] > 1 and len(slices.shape) == 2:
        raise ValueError(
            f"{who}. Under fully_shard PyTorch saves such matrices with rows in another order. Expected: two "
            "parameters with Shard(0), or a stack of them."
        )
    if slices.cut is not None:
        dim, factor = slices.cut
        size = slices.shape[dim] // factor
        if _ends(size, slices.mesh.size())[-1] == size:
            raise ValueError(
                f"{who}, so that a rank has nothing of it. Expected: at least one of its {size} in dimension {dim} on "
                "each rank."
            )
        if tuple(slices.mesh.mesh.tolist()) != tuple(sorted(slices.mesh.mesh.tolist())) and size % slices.mesh.size():
            raise ValueError(
                f"{who}: unequal slices on ranks that do not ascend, which PyTorch puts together in another order. "
                "Expected: a mesh whose ranks ascend, or equal slices."
            )
    if not parameter.is_meta and parameter.device.type != ranks.device_type:
        raise ValueError(f"{who}, on {parameter.device}. Expected: on {ranks.device_type}, as its mesh.")


def find_tensor_mesh(model: nn.Module, managed: Any, data_ranks: Collection[int], here: int) -> DeviceMesh | None:
    """Returns the mesh over which tensor parallelism divides the model, None without it.

    `managed`: what `fully_shard` has made of parameters, by module and name.
    """
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            spec = spec_of(parameter, managed.get((module, attribute)))
            if spec is not None and is_over_tensor_parallel(spec.mesh, data_ranks, here):
                mesh: DeviceMesh = spec.mesh
                return mesh
    return None
