"""Models that are under fully_shard before dedicate_params, as some trainers build them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from dmuon._setup.expert_parallel import check_columns
from dmuon._setup.leaf import Leaf
from dmuon._setup.place import clean_name, joined
from dmuon._setup.ranks import Ranks, rows_of
from dmuon._setup.slices import placements_with
from dmuon._setup.tensor_parallel import Managed, check_joined, check_slices, find_tensor_mesh, managed_of


def mesh_and_policy_of(model: nn.Module) -> tuple[DeviceMesh | None, MixedPrecisionPolicy | None]:
    """Returns the mesh of `fully_shard` and the policy of most modules, or None if `fully_shard` was not called."""
    if not isinstance(model, nn.Module):
        return None, None  # `plain_module` refuses it
    meshes = (parameter.mesh_info.mesh for parameter in managed_by_fsdp(model).values())
    policies = [getattr(state, "_mp_policy", None) for state in _states(model)]
    found = Counter(policy for policy in policies if isinstance(policy, MixedPrecisionPolicy)).most_common(1)
    return next(meshes, None), found[0][0] if found else None


def tensor_mesh_of(model: nn.Module, data_ranks: Collection[int], here: int) -> DeviceMesh | None:
    """Returns the mesh of the model's tensor parallelism, see `find_tensor_mesh`."""
    if not isinstance(model, nn.Module):
        return None
    return find_tensor_mesh(model, managed_by_fsdp(model), data_ranks, here)


def check_sharded(leaves: Sequence[Leaf], model: nn.Module, ranks: Ranks, mesh: DeviceMesh | None) -> None:
    """Raises ValueError if a leaf cannot leave its `fully_shard`, or if states cannot have it on `mesh`, as given."""
    check_joined(mesh, ranks.tensor_mesh)
    sharded = [leaf for leaf in leaves if isinstance(leaf.parameter, DTensor)]
    if sharded and any(getattr(state, "_is_root", None) is not None for state in _states(model)):
        raise ValueError(
            "dedicate_params: model: a forward has run under fully_shard. Expected: dedicate_params before the first."
        )
    managed = managed_by_fsdp(model)
    for leaf in sharded:
        theirs = managed_of(leaf, managed)
        _check_layout(leaf, theirs, ranks)
        device, may_be_on_host = leaf.parameter.device, theirs is not None and theirs.offload_to_cpu
        if device.type not in ("meta", ranks.device_type) and not may_be_on_host:
            raise ValueError(
                f"dedicate_params: model: '{leaf.name}' is on {device}, and its mesh on {ranks.device_type}. Expected: "
                f"a mesh on {device.type}, or no model.to(...) after fully_shard or other parallelism."
            )


def _check_layout(leaf: Leaf, theirs: Any, ranks: Ranks) -> None:
    """Raises ValueError if a DTensor does not lie on the mesh as dmuon can take it. `theirs`: see `managed_of`."""
    parameter: Any = leaf.parameter
    if leaf.num_columns > 1:
        check_columns(leaf, ranks)
        return
    if theirs is not None or leaf.slices is None:
        own = parameter.device_mesh if theirs is None else theirs.mesh_info.mesh
        rows, placements = rows_of(own.mesh), list(parameter.placements)
        expected = placements_with(leaf.slices, own.ndim)
        if theirs is None:
            raise ValueError(
                f"dedicate_params: model: '{leaf.name}' is a DTensor that no fully_shard of this model manages, over "
                f"ranks {rows}, and the mesh has {ranks.mesh_rows}. Expected: tensor parallelism over other ranks than "
                "the mesh's, whose data-parallel part dedicate_params and fully_shard take, as mesh['dp']."
            )
        if rows != ranks.mesh_rows or placements != expected:
            raise ValueError(
                f"dedicate_params: model: '{leaf.name}' is sharded by {placements} over ranks {rows}. Expected: "
                f"{expected} over {ranks.mesh_rows}, by fully_shard on the same mesh. After dedicate_params "
                "fully_shard may have any shard_placement_fn."
            )
    if leaf.slices is not None:
        check_slices(leaf.name, leaf.slices)


def managed_by_fsdp(model: nn.Module) -> Managed:
    """Returns what `fully_shard` has made of the parameters that it manages, by their modules and names."""
    return {_key(made): made for state in _states(model) for group in param_groups(state) for made in group.fsdp_params}


def replaced_by_fsdp(model: nn.Module) -> dict[int, str]:
    """Returns the names of the parameters that `fully_shard` has replaced, by the number that it gave them.

    Empty with a PyTorch that numbers none: 2.13 does, 2.11 does not.
    """
    paths = {module: path for path, module in model.named_modules()}
    names = {}
    for (module, name), made in managed_by_fsdp(model).items():
        if (number := getattr(made, "_orig_param_uid", None)) is not None:
            names[number] = clean_name(joined(paths[module], name))
    return names


def release(leaves: Sequence[Leaf], model: nn.Module) -> None:
    """Removes leaves, which passed `check_sharded`, from the groups in which `fully_shard` manages parameters.

    Afterwards `fully_shard` is as if it had never seen them. A leaf still has its DTensor, which owners will read.
    """
    taken = {(place.module, place.attribute) for leaf in leaves for place in leaf.places}
    for state in _states(model):
        for group in param_groups(state):
            for parameter in group.fsdp_params:
                if _key(parameter) in taken:
                    parameter._post_load_hook_handle.remove()  # else a load would look for the shard
            group.fsdp_params = [parameter for parameter in group.fsdp_params if _key(parameter) not in taken]
        rest = [group for group in param_groups(state) if group.fsdp_params]
        if hasattr(state, "_fsdp_param_groups"):
            state._fsdp_param_groups = rest
        else:  # before 2.11 PyTorch has at most one group
            state._fsdp_param_group = rest[0] if rest else None


def is_of_fsdp2(hook: Any) -> bool:
    """True if FSDP2 has registered this hook of a module. A user's may have no `__module__`."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """Returns the modules of `model` under fully_shard."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def name_of(module: nn.Module | FSDPModule, model: nn.Module) -> str:
    """Returns the qualified name of a module of `model`, for messages."""
    return next(clean_name(path) for path, other in model.named_modules() if other is module) or "(root)"


def _states(model: nn.Module) -> Iterator[Any]:
    return (module._get_fsdp_state() for module in fsdp_modules(model))


def param_groups(state: Any) -> list[Any]:
    """Returns the groups in which FSDP2 manages the parameters of a module with this state."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]


def _key(parameter: Any) -> tuple[nn.Module, str]:
    return parameter._module_info.module, parameter._module_info.param_name
