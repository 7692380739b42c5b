"""Tensor parallelism: which ranks share matrices with this one, and which leaves are divided over them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dmuon._setup.leaf import Leaf
from dmuon._setup.ranks import Ranks
from dmuon._setup.slices import Slices, cuts_experts, ends_of_slices, joined_meshes

Managed = dict[tuple[nn.Module, str], Any]  # FSDPParams, by modules and names of parameters


def managed_of(entry: Leaf, managed: Managed) -> Any:
    """Returns what `fully_shard` has made of a parameter, None if it does not manage it."""
    keys = ((place.module, place.attribute) for place in entry.places)
    return next((managed[key] for key in keys if key in managed), None)


def note_slices(entry: Leaf, managed: Managed, ranks: Ranks | None, function: str) -> None:
    """Sets `slices` of a parameter that tensor parallelism has made a DTensor.

    Raises:
        ValueError: its mesh has several dimensions, its values are an open sum, or its rows are interleaved. Names
            `function`.
    """
    spec = spec_of(entry.parameter, managed_of(entry, managed))
    if ranks is not None and ranks.tensor_parallel > 1 and any(view.heights for view in entry.views):
        raise ValueError(
            f"{function}: model: '{entry.name}' is in a model under tensor parallelism, and has a view of interleaved "
            f"rows, {', '.join(map(str, entry.views))}. Expected: another one, such as True, by select."
        )
    if spec is None or ranks is None:
        return
    if is_over_tensor_parallel(spec.mesh, ranks.by_slot, ranks.here):
        entry.slices = slices_of(entry.name, spec, function)
        if (members := spec.mesh.mesh.tolist()) != sorted(members):
            raise ValueError(
                f"{function}: model: '{entry.name}' is divided by tensor parallelism: {entry.slices}, which do not "
                "ascend: PyTorch then mixes up what each rank has. Expected: a device mesh whose ranks ascend."
            )
        if tuple(members) != ranks.slot_members:
            raise ValueError(
                f"{function}: model: '{entry.name}' is divided by tensor parallelism: {entry.slices}. Expected: over "
                f"the ranks {ranks.slot_members}, as the first parameter is, in one order, and equally many ranks at "
                "each place of the mesh, as in a device mesh whose ranks ascend."
            )
    elif managed_of(entry, managed) is None and entry.parameter.requires_grad and _is_inside(spec, ranks):
        raise ValueError(
            f"{function}: model: '{entry.name}' is a DTensor that no fully_shard of this model manages, with "
            f"{list(spec.placements)} over ranks {spec.mesh.mesh.tolist()}, which are ranks of the mesh too: nobody "
            "would average its gradients. Expected: a plain parameter, or one of fully_shard; or tensor parallelism "
            "over other ranks than the mesh's, whose data-parallel part dedicate_params and fully_shard take, as "
            "mesh['data']; alone, over T ranks of a mesh (1, T)."
        )
    elif spec.mesh.ndim > 1 and not set(spec.mesh.mesh.flatten().tolist()) <= set(ranks.by_slot):
        raise ValueError(
            f"{function}: model: '{entry.name}' is divided by {list(spec.placements)} over a mesh of "
            f"{spec.mesh.ndim} dimensions, {spec.mesh.mesh.tolist()}. Expected: tensor parallelism over one dimension "
            "of the device mesh, beside the data-parallel ones that dedicate_params and fully_shard take."
        )


def note_slices_alone(model: nn.Module, leaves: Collection[Leaf], function: str) -> bool:
    """Sets `slices` of leaves without knowing the data-parallel ranks. True if the model is under tensor parallelism.

    A mesh that divides nothing but stacks is taken for one of experts; one that divides nothing, only if no other does.
    """
    specs = (spec_of(parameter) for parameter in model.parameters())
    candidates = (spec for spec in specs if spec is not None and spec.mesh.ndim == 1 and not _is_stack(spec))
    first = min(candidates, key=lambda spec: bool(spec.placements[0].is_replicate()), default=None)
    if first is None or (mesh := first.mesh).size() == 1:
        return False
    for leaf in leaves:
        if (spec := spec_of(leaf.parameter)) is not None and spec.mesh == mesh:
            leaf.slices = slices_of(leaf.name, spec, function)
    return True


def is_sharded(parameter: Any, ranks: Ranks) -> bool:
    """True if `fully_shard` manages a parameter, which is then a DTensor over more ranks than those of a slot."""
    return isinstance(parameter, DTensor) and parameter.device_mesh != ranks.tensor_mesh


def is_sliced(parameter: Any, ranks: Ranks) -> bool:
    """True if the ranks of a slot have different parts of a DTensor, which `fully_shard` may have cut too."""
    mesh: DeviceMesh = parameter.device_mesh
    over_slices = not is_sharded(parameter, ranks) or mesh.ndim > len(ranks.mesh_groups)
    return over_slices and not parameter.placements[-1].is_replicate()


def spec_of(parameter: Any, managed: Any = None) -> Any:
    """Returns mesh and placements of a DTensor as tensor parallelism made it, None of other tensors.

    `managed`: what `fully_shard` has made of the parameter, if it manages it.
    """
    if managed is not None:  # before 2.13 PyTorch has another name
        return getattr(managed, "_unsharded_dtensor_spec", None) or getattr(managed, "_tp_spec", None)
    return parameter._spec if isinstance(parameter, DTensor) else None


def _is_inside(spec: Any, ranks: Ranks) -> bool:
    """True if a DTensor is divided over ranks of the mesh, and not by experts."""
    is_inside = set(spec.mesh.mesh.flatten().tolist()) <= set(ranks.by_slot)
    return is_inside and spec.mesh.size() > 1 and not _is_stack(spec)


def _is_stack(spec: Any) -> bool:
    """True if a DTensor is divided as a stack is by experts."""
    return cuts_experts(spec.shape, spec.placements[-1])


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


def check_slices(name: str, slices: Slices) -> None:
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
        if ends_of_slices(size, slices.mesh.size())[-1] == size:
            raise ValueError(
                f"{who}, so that a rank has nothing of it. Expected: at least one of its {size} in dimension {dim} on "
                "each rank."
            )


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
