"""Owners' tensors as fully_shard would have cut them: DTensors cut along their first dimension, on every rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement

from dmuon import _C
from dmuon._setup.leaf import Leaf
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.ranks import Ranks
from dmuon._setup.slices import ends_of_slices, joined_meshes, local_part, placements_with

MASTER = "master"
_PIECE = _C.PIECE_ELEMENTS

_Parts = dict[int, torch.Tensor]  # by leaf


class OwnedShards:
    """Reads and writes owners' tensors, the master and a rule's states, as shards, by the index of their leaf.

        (tensor,) = shards.read([index], MASTER, torch.float32)  # a DTensor
        shards.write({index: tensor}, MASTER)

    Collective calls are so over the mesh, and every rank names the same leaves in one order. Without process groups
    there is no mesh, and tensors are plain.
    """

    def __init__(
        self,
        transfers: _C.Transfers,
        leaves: Sequence[Leaf],
        states: Sequence[str],
        ranks: Ranks,
        mesh: DeviceMesh | None,
    ) -> None:
        """`states` are the rule's names. `mesh` is as for fully_shard, None for all ranks."""
        self._transfers, self._leaves, self._ranks, self._given = transfers, leaves, ranks, mesh
        self.states = states
        self.without_values: set[int] = set()  # leaves that were neither initialised nor loaded

    @functools.cached_property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of `fully_shard`. The first access is collective if no mesh was given."""
        if self._given is None and dist.is_initialized():
            return init_device_mesh(self._ranks.device_type, (dist.get_world_size(),))
        return self._given

    @functools.cached_property
    def _mesh_with_slices(self) -> DeviceMesh:
        assert self.mesh is not None and self._ranks.tensor_mesh is not None
        return joined_meshes(self.mesh, self._ranks.tensor_mesh)

    @property
    def mesh_of_norms(self) -> DeviceMesh | None:
        """The mesh on which FSDP2 has most parameters: torch adds norms up on one mesh alone."""
        return self.mesh if self._ranks.tensor_mesh is None else self._mesh_with_slices

    def mesh_of(self, index: int) -> DeviceMesh | None:
        """Returns the mesh of a leaf's DTensors. With tensor parallelism it has a dimension more."""
        return self.mesh if self._leaves[index].slices is None else self._mesh_with_slices

    def dtype_of(self, index: int) -> torch.dtype:
        return self._leaves[index].dtype

    def placements_of(self, index: int) -> list[Placement]:
        """Returns the placements of a leaf's DTensors."""
        return placements_with(self._leaves[index].slices, 1 if self.mesh is None else self.mesh.ndim)

    def read(self, indices: Sequence[int], name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """Returns the tensors of this name, each with memory of its own. Collective."""
        flat = self._transfers.to_shards(indices, name, dtype)
        return [self._as_saved(index, name, values) for index, values in zip(indices, flat, strict=True)]

    def shape(self, index: int, name: str) -> torch.Size:
        """Returns the shape of a leaf's named tensor, whose first dimension is cut into shards.

        It is the leaf's first dimension, or one of the tensor's own if no rows of it belong to rows of the leaf.
        """
        leaf, sizes = self._leaves[index], self._transfers.sizes_of(index, name)
        if leaf.cut is not None:  # a rank has slices of it alone, and only states that are cut like the leaf
            return leaf.shape
        rows = self._transfers.rows_of(index, name)
        return torch.Size(sizes if sizes[0] == rows else (rows, math.prod(sizes) // rows))

    def _shape_of_rank(self, index: int, name: str) -> Sequence[int]:
        """Returns the shape of what FSDP2 would cut: of this rank's slice, or of the whole tensor."""
        is_cut = self._leaves[index].cut is not None
        return self._transfers.sizes_of(index, name) if is_cut else self.shape(index, name)

    def _as_saved(self, index: int, name: str, flat: torch.Tensor) -> torch.Tensor:
        shape, mesh = self.shape(index, name), self.mesh_of(index)
        if mesh is None:
            return flat.view(shape)
        local = flat.view(-1, *self._shape_of_rank(index, name)[1:])
        stride = torch.empty(shape, device="meta").stride()
        made: torch.Tensor = DTensor.from_local(
            local, mesh, self.placements_of(index), run_check=False, shape=shape, stride=stride
        )
        return made

    def problem(self, index: int, value: Any, name: str = MASTER) -> str | None:
        """Returns the reason why a leaf's named tensor cannot have this value, or None."""
        shape = tuple(self.shape(index, name))
        if not isinstance(value, torch.Tensor):
            return f"expected a tensor of shape {shape}, got {type(value).__name__}"
        if tuple(value.shape) != shape:
            return f"expected shape {shape}, got {tuple(value.shape)}"
        if isinstance(value, OwnedTensor):
            return "expected values, got the placeholder of another model, which has them in its state_dict()"
        if value.is_meta or not value.is_floating_point():
            return f"expected floating values, got {value.dtype} on {value.device}"
        mesh = self.mesh_of(index)
        if isinstance(value, DTensor) and value.device_mesh != mesh:
            return f"expected a DTensor on {mesh}, or the whole tensor on every rank, got one on {value.device_mesh}"
        cut = value if isinstance(value, DTensor) and list(value.placements) == self.placements_of(index) else None
        if cut is not None and mesh is not None:
            # As pickled: the mesh of another rank has that rank's.
            theirs, here = (self._part(one.get_coordinate()) for one in (cut.device_mesh, mesh))
            if theirs and here and theirs != here:
                return (
                    f"expected part {here}, this rank's, got part {theirs}. (If one rank alone saved "
                    "the checkpoint: save by torch.distributed.checkpoint, or inside of dmuon.whole_states.)"
                )
        rows = self._shape_of_rank(index, name)[0]
        if cut is not None and cut.to_local().shape[0] != self._local_rows(rows):
            return f"expected a shard of {self._local_rows(rows)} rows, got one of {cut.to_local().shape[0]}"
        return None

    def _part(self, coordinate: Sequence[int] | None) -> str:
        """Returns the part that ranks with a coordinate have; replicates have equal parts."""
        first = 0 if self.mesh is None else self.mesh.ndim - 1
        return ", ".join(map(str, (coordinate or ())[first:]))

    def cut(self, index: int, value: torch.Tensor, sends: bool = False) -> torch.Tensor:
        """Returns a leaf's DTensor with its placements, or as a whole tensor. Returns other tensors as they are.

        `sends`: False to return also a DTensor as it is from which this rank lacks its shard. True is collective.
        """
        placements = self.placements_of(index)
        if not isinstance(value, DTensor) or list(value.placements) == placements:
            return value
        if all(placement.is_replicate() for placement in value.placements):
            return value.to_local().detach()  # DTensor would cut it in the order of the mesh, which need not ascend
        if not sends:
            return value
        if self._leaves[index].slices is not None:
            return value.full_tensor().detach()  # DTensor cuts no dimension twice
        cut: torch.Tensor = value.redistribute(placements=placements)
        return cut.detach()

    def _local_rows(self, rows: int) -> int:
        assert self.mesh is not None
        dim = self.mesh.ndim - 1
        ends = [0, *ends_of_slices(rows, self.mesh.size(dim)), rows]
        index = self.mesh.get_local_rank(dim)
        return ends[index + 1] - ends[index]

    def write(self, values: Mapping[int, torch.Tensor], name: str) -> None:
        """Writes owners' tensors, each from all ranks' shards or from the owner's own whole tensor. Collective.

        Units see new masters after the engine's `publish`.
        """
        self._write(*self._parts(values), name)

    def _parts(self, values: Mapping[int, torch.Tensor]) -> tuple[_Parts, _Parts]:
        """Returns this rank's shards, flat, and what this rank has of leaves that are whole. Collective."""
        shards, wholes = {}, {}
        for index in sorted(values):
            value = self.cut(index, values[index].detach(), sends=True)
            slices = self._leaves[index].slices
            if isinstance(value, DTensor):
                shards[index] = local_part(value).flatten()
            else:
                wholes[index] = value if slices is None else slices.of_rank(value, self._ranks.tensor_rank)
        return shards, wholes

    def _write(self, shards: _Parts, wholes: _Parts, name: str) -> None:
        if name == MASTER:
            self.without_values -= shards.keys() | wholes.keys()
        self._transfers.from_shards(list(shards), name, list(shards.values()))
        for index, value in wholes.items():
            self._transfers.scatter(index, name, value)

    def zero(self, index: int, names: Iterable[str]) -> None:
        """Sets a leaf's tensors of these names to zero at their owners. Sends nothing."""
        for name in names:
            for part in self._transfers.owned_parts(index, name):
                part.tensor.zero_()

    def write_weights(self, values: Mapping[int, torch.Tensor]) -> None:
        """Writes masters from weights in the leaves' own dtypes. Collective. Call `publish` afterwards.

        The fp32 master behind an unchanged low-precision weight does not change. So weights and masters may be loaded
        in any order.
        """
        for piece in self._pieces(sorted(values)):
            self._write_piece({index: values[index] for index in piece})

    def _pieces(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Yields leaves that are in fp32 at the same time, in equal pieces on all ranks."""
        piece: list[int] = []
        for index in indices:
            if piece and sum(self._leaves[i].shape.numel() for i in [*piece, index]) > _PIECE:
                yield piece
                piece = []
            piece.append(index)
        if piece:
            yield piece

    def _write_piece(self, values: Mapping[int, torch.Tensor]) -> None:
        shards, wholes = self._parts(values)
        low = [index for index in shards if self.dtype_of(index) != torch.float32]
        for index, old in zip(low, self._transfers.to_shards(low, MASTER, torch.float32), strict=True):
            shards[index] = self._changed(index, old, shards[index])
        for index in wholes:
            parts = self._transfers.owned_parts(index, MASTER) if self.dtype_of(index) != torch.float32 else []
            if parts:
                flat = wholes[index].reshape(-1).to(parts[0].tensor.device, torch.float32, copy=True)
                for part in parts:
                    new_part = flat[part.elements.begin : part.elements.end]
                    new_part.copy_(self._changed(index, part.tensor.view(-1), new_part))
                wholes[index] = flat
        self._write(shards, wholes, MASTER)

    def _changed(self, index: int, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Returns `new` in fp32, but `old` in elements that are equal in the leaf's own dtype."""
        value = new.to(old.device, self.dtype_of(index))
        return torch.where(old.to(value.dtype) == value, old, value.float())
