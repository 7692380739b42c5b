"""Owners' tensors as fully_shard would have cut them: DTensors cut along their first dimension, on every rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dmuon import _C
from dmuon._setup.leaf import Leaf
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.ranks import Ranks

MASTER = "master"
_PIECE = 1 << 24  # elements, as the engine's pieces of shards


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
        dtypes: Sequence[torch.dtype],
        states: Sequence[str],
        ranks: Ranks,
        mesh: DeviceMesh | None,
    ) -> None:
        """`dtypes` are the leaves', `states` the rule's names. `mesh` is as for fully_shard, None for all ranks."""
        self._transfers, self._leaves, self._ranks, self._given = transfers, leaves, ranks, mesh
        self.dtypes, self.states = dtypes, states
        self.without_values: set[int] = set()  # leaves that were neither initialised nor loaded

    @functools.cached_property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of `fully_shard`. The first access is collective if no mesh was given."""
        if self._given is None and dist.is_initialized():
            return init_device_mesh(self._ranks.device_type, (dist.get_world_size(),))
        return self._given

    @property
    def placements(self) -> list[Placement]:
        """The placements of every leaf."""
        return [Replicate()] * (0 if self.mesh is None else self.mesh.ndim - 1) + [Shard(0)]

    def read(self, indices: Sequence[int], name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """Returns the tensors of this name, each with memory of its own. Collective."""
        flat = self._transfers.to_shards(indices, name, dtype)
        return [self._as_saved(self.shape(index, name), values) for index, values in zip(indices, flat, strict=True)]

    def shape(self, index: int, name: str) -> torch.Size:
        """Returns the shape of a leaf's named tensor, which has the leaf's first dimension.

        Raises:
            ValueError: that dimension does not divide the tensor, so that no rows of it belong to rows of the leaf.
        """
        leaf, sizes = self._leaves[index], self._transfers.sizes_of(index, name)
        rows, elements = leaf.shape[0], math.prod(sizes)
        if elements % rows:
            raise ValueError(
                f"Muon: '{leaf.name}': {name}: expected a multiple of the matrix's {rows} rows, got {elements} elements"
            )
        return torch.Size(sizes if sizes[0] == rows else (rows, elements // rows))

    def _as_saved(self, shape: torch.Size, flat: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return flat.view(shape)
        local = flat.view(-1, *shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        made: torch.Tensor = DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=shape, stride=stride
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
        if isinstance(value, DTensor) and value.device_mesh != self.mesh:
            return (
                f"expected a DTensor on {self.mesh}, or the whole tensor on every rank, got one on {value.device_mesh}"
            )
        cut = value if isinstance(value, DTensor) and list(value.placements) == self.placements else None
        if cut is not None and self.mesh is not None:
            # As pickled: the mesh of another rank has that rank's.
            theirs, here = cut.device_mesh.get_coordinate(), self.mesh.get_coordinate()
            if theirs and here and theirs[-1] != here[-1]:
                return (
                    f"expected part {here[-1]}, this rank's, got part {theirs[-1]}. (If one rank alone saved "
                    "the checkpoint: save by torch.distributed.checkpoint, or inside of dmuon.whole_states.)"
                )
        if cut is not None and cut.to_local().shape[0] != self._local_rows(shape[0]):
            return f"expected a shard of {self._local_rows(shape[0])} rows, got one of {cut.to_local().shape[0]}"
        return None

    def cut(self, value: torch.Tensor, sends: bool = False) -> torch.Tensor:
        """Returns a DTensor with the placements of every leaf, other tensors as they are.

        `sends`: False to return also a DTensor as it is from which this rank lacks its shard. True is collective.
        """
        if not isinstance(value, DTensor) or list(value.placements) == self.placements:
            return value
        if not sends and any(not placement.is_replicate() for placement in value.placements):
            return value
        cut: torch.Tensor = value.redistribute(placements=self.placements)
        return cut.detach()

    def _column(self) -> int:
        """Returns the number of this rank's part."""
        assert self.mesh is not None
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    def _local_rows(self, rows: int) -> int:
        assert self.mesh is not None
        index, chunk = self._column(), -(-rows // self.mesh.size(self.mesh.ndim - 1))
        return max(0, min(rows, (index + 1) * chunk) - index * chunk)

    def write(self, values: Mapping[int, torch.Tensor], name: str) -> None:
        """Writes owners' tensors, each from all ranks' shards or from the owner's own whole tensor. Collective.

        Units see new masters after the engine's `publish`.
        """
        values = {index: self.cut(values[index], sends=True) for index in sorted(values)}
        if name == MASTER:
            self.without_values -= values.keys()
        whole = {index: value for index, value in values.items() if not isinstance(value, DTensor)}
        sharded = [index for index in values if index not in whole]
        self._transfers.from_shards(sharded, name, [_flat(values[index]) for index in sharded])
        for index, value in whole.items():
            self._transfers.scatter(index, name, value.detach())

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
        new = {index: value.detach() for index, value in values.items()}
        low = [index for index in sorted(new) if self.dtypes[index] != torch.float32]
        sharded = [index for index in low if isinstance(new[index], DTensor)]
        for index, old in zip(sharded, self.read(sharded, MASTER, torch.float32), strict=True):
            new[index] = self._changed(index, old, new[index])
        for index in low:
            if index not in sharded and (parts := self._transfers.owned_parts(index, MASTER)):
                flat = new[index].reshape(-1).to(parts[0].tensor.device, torch.float32, copy=True)
                for part in parts:
                    new_part = flat[part.elements.begin : part.elements.end]
                    new_part.copy_(self._changed(index, part.tensor.view(-1), new_part))
                new[index] = flat
        self.write(new, MASTER)

    def _changed(self, index: int, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Returns `new` in fp32, but `old` in elements that are equal in the leaf's own dtype."""
        value = new.to(old.device, self.dtypes[index])
        return torch.where(old.to(value.dtype) == value, old, value.float())


def _flat(value: Any) -> torch.Tensor:
    local: torch.Tensor = value.to_local().detach().flatten()
    return local
