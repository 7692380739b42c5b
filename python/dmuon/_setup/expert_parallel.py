"""Stacks [experts, rows, cols] that expert parallelism divides over a node: DTensors that fully_shard did not make."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard

from dmuon._setup.leaf import Leaf
from dmuon._setup.ranks import Ranks, rows_of
from dmuon._setup.tensor_parallel import Managed, managed_of


def note_columns(entry: Leaf, managed: Managed, function: str) -> None:
    """Sets `num_columns` of a stack that Muon updates and that is divided by experts.

    Raises:
        ValueError: its experts or views cannot be divided so; or it is a DTensor for AdamW, whose gradients nobody
            would average.
    """
    parameter: Any = entry.parameter
    foreign = isinstance(parameter, DTensor) and managed_of(entry, managed) is None
    if not foreign or not parameter.requires_grad or entry.slices is not None or function == "inventory":
        return
    if not entry.views:
        raise ValueError(
            f"{function}: model: '{entry.name}' is a DTensor with {list(parameter.placements)} that no fully_shard of "
            "this model manages, and AdamW's, so that nobody would average its gradients. Expected: a plain parameter, "
            "or one of fully_shard; or Muon, of a stack [experts, rows, cols] that is divided by experts; or tensor "
            "parallelism over ranks outside of the mesh, whose data-parallel part dedicate_params and fully_shard take."
        )
    replicated = [Replicate()] * (parameter.device_mesh.ndim - 1)
    if parameter.ndim != 3 or list(parameter.placements) != [*replicated, Shard(0)]:
        return  # check_sharded refuses it
    entry.num_columns = parameter.device_mesh.size(-1)
    experts, counts = parameter.shape[0], [view.count for view in entry.views]
    if experts % entry.num_columns or len(counts) > 1 or counts[0] % experts:
        raise ValueError(
            f"{function}: model: '{entry.name}' is divided by experts over {entry.num_columns} ranks, and has "
            f"{experts} experts with views of {counts} matrices. Expected: equally many experts on each rank, and one "
            "view, of whole matrices of each expert."
        )


def check_columns(leaf: Leaf, ranks: Ranks) -> None:
    """Raises ValueError if a stack is not divided over the columns of the mesh, or has no values there."""
    parameter: Any = leaf.parameter
    rows = rows_of(parameter.device_mesh.mesh)
    who = f"dedicate_params: model: '{leaf.name}' is divided by experts over ranks {rows}"
    if rows not in ((ranks.row,), ranks.rows):
        raise ValueError(
            f"{who}. Expected: over the ranks of a node, here {ranks.row}: those of one replicate of a mesh "
            "(replicate, shard), those of one host of a mesh (shard) over several hosts, else all of the mesh."
        )
    if parameter.is_meta:
        raise ValueError(
            f"{who} and on the meta device. Expected: values, from its initialisation or a checkpoint, before "
            "dedicate_params."
        )
    local = parameter.to_local().shape
    expected = (parameter.shape[0] // leaf.num_columns, *parameter.shape[1:])
    if tuple(local) != expected:
        raise ValueError(f"{who}. Expected: {expected} of it on each rank, got {tuple(local)}.")
