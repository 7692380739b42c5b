"""Checks by `Muon`: the model must be as after `dedicate_params`, and must fit the arguments of `fully_shard`."""

from __future__ import annotations

import itertools

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from dmuon._running.divide_factor import problem_of_factors
from dmuon._setup.dedication import BeforeMuon, Dedication
from dmuon._setup.leaf import Leaf
from dmuon._setup.options import dtypes_of
from dmuon._setup.place import clean_name, joined
from dmuon._setup.ranks import rows_of
from dmuon._setup.sharded import fsdp_modules, managed_by_fsdp
from dmuon._setup.units import Unit

FAILED = (
    "Muon: model: an earlier Muon(model) was interrupted or has failed, and has changed the model. Expected: a new "
    "model for dedicate_params and Muon."
)


def check_parameters(model: nn.Module, leaves: list[Leaf], before_muon: BeforeMuon, facts: list[str]) -> None:
    """Checks the parameters: Muon would not update new ones, and nobody would train removed ones.

    `facts` gets the parameters that are trainable now.

    Raises:
        ValueError: the user has added, frozen or unfrozen a parameter, or
            replaced the module of a leaf. Wrappers around modules are no change. After a start on the meta device
            leaves may be frozen, because modules hold them.
    """
    modules = dict(model.named_modules())
    present = set(modules.values())
    whole = "after dedicate_params. Expected: the whole model, as it is trained, at dedicate_params."
    for leaf in leaves:
        for place in leaf.places:
            if place.module not in present or place.is_replaced():
                raise ValueError(f"Muon: model: '{leaf.name}' or its module was replaced or removed {whole}")
    for path, module in modules.items():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = clean_name(joined(path, attribute))
            was_trainable = before_muon.known.get(module, {}).get(attribute)
            if was_trainable is None:
                raise ValueError(f"Muon: model: '{name}' was added {whole}")
            if parameter.requires_grad and not was_trainable:
                raise ValueError(
                    f"Muon: model: '{name}' was frozen at dedicate_params and is trainable now: AdamW would update it, "
                    "whatever it is. Expected: unfreeze it before dedicate_params."
                )
            if parameter.requires_grad and parameter.is_complex():
                raise ValueError(f"Muon: model: '{name}': expected a real dtype, got {parameter.dtype}")
            if was_trainable and not parameter.requires_grad and before_muon.meta_start is None:
                raise ValueError(
                    f"Muon: model: '{name}' was frozen between dedicate_params and Muon, when no module held matrices: "
                    "these would be trained. Expected: freeze before dedicate_params, or after Muon."
                )
            facts.append(f"'{name}' {'trainable' if parameter.requires_grad else 'frozen'}")


def check_sentinels(model: nn.Module, dedication: Dedication) -> torch.device | None:
    """Checks casts and moves of the model since dedicate_params.

    Returns:
        The device on which the model computes, None if there are no leaves.

    Raises:
        ValueError: the model was cast, is on the meta device, or not on the device of its mesh.
    """
    device = None
    for leaf in dedication.leaves:
        sentinel = leaf.places[0].sentinel()
        device = sentinel.device
        if sentinel.dtype != leaf.parameter.dtype or (sentinel.is_meta and not leaf.parameter.is_meta):
            raise ValueError(
                f"Muon: model: '{leaf.name}' was {leaf.parameter.dtype} on {leaf.parameter.device} at "
                f"dedicate_params, and its module has become {sentinel.dtype} on {sentinel.device}. Expected: cast "
                "the model before dedicate_params; mp_policy chooses the dtype of compute."
            )
    on_meta = [leaf.name for leaf in dedication.leaves if leaf.places[0].sentinel().is_meta]
    on_meta += [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise ValueError(
            f"Muon: model: '{on_meta[0]}' is on the meta device, and {len(on_meta) - 1} more. Expected: "
            "model.to_empty(device=...) after fully_shard, then its initialisation, or after Muon a checkpoint."
        )
    of_mesh = dedication.ranks.device_type
    managed = managed_by_fsdp(model).values()
    if device is not None and device.type == "cpu" != of_mesh and managed and all(of.offload_to_cpu for of in managed):
        # CPUOffloadPolicy wants `to_empty` on the host, from where owners take their first values too.
        return torch.device(of_mesh, torch.get_device_module(of_mesh).current_device())
    if device is not None and dedication.ranks.size > 1 and device.type != of_mesh:
        raise ValueError(
            f"Muon: model: '{dedication.leaves[0].name}' is on {device}, and the mesh of dedicate_params on {of_mesh}. "
            f"Expected: model.to('{of_mesh}') before Muon, or dedicate_params with a mesh on {device.type}."
        )
    return device


def check_units(units: list[Unit], dedication: Dedication) -> None:
    """Requires one dtype of all leaves of a unit, because they share one buffer."""
    if dedication.mp_policy.param_dtype is not None:
        return
    for unit in units:
        leaves = [dedication.leaves[index] for index in unit.leaves]
        for first, leaf in itertools.pairwise(leaves):
            if leaf.parameter.dtype != first.parameter.dtype:
                raise ValueError(
                    f"Muon: model: unit '{unit.label}' mixes dtypes: '{first.name}' is "
                    f"{first.parameter.dtype}, '{leaf.name}' is {leaf.parameter.dtype}. Expected: one dtype a "
                    "unit, or mp_policy with param_dtype."
                )


def check_host_parameters(model: nn.Module, dedication: Dedication) -> None:
    """Requires fully_shard's mesh and divisor of gradients to be ours."""
    ranks = dedication.ranks
    managed = {id(module._parameters[name]): made for (module, name), made in managed_by_fsdp(model).items()}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or not (parameter.requires_grad or id(parameter) in managed):
            continue
        if parameter.device_mesh == ranks.tensor_mesh:
            continue
        made = managed.get(id(parameter))
        rows = rows_of(parameter.device_mesh.mesh if made is None else made.mesh_info.mesh.mesh)
        if rows != ranks.mesh_rows:
            raise ValueError(
                f"Muon: model: '{name}' is sharded over ranks {rows}, dedicate_params was given {ranks.mesh_rows}. "
                "Expected: the same mesh for dedicate_params and fully_shard."
            )
        if made is not None and made.offload_to_cpu and parameter.device.type != "cpu":
            raise ValueError(
                f"Muon: model: '{name}' is on {parameter.device}, and its fully_shard has CPUOffloadPolicy. Expected: "
                "model.to_empty(device='cpu'), and no model.to(...) after fully_shard."
            )
        if all(placement.is_replicate() for placement in parameter.placements):  # norms would count it twice
            raise ValueError(
                f"Muon: model: '{name}' is whole on every rank of {rows}: was this module given to replicate()? "
                "Expected: fully_shard on the same mesh."
            )
    _check_policies(model, dedication)
    ours = dedication.across_ranks.divide_factor(ranks.num_slots)
    if problem := problem_of_factors(model, fsdp_modules(model), ours, unset=ours):  # users may set it until the step
        raise ValueError(problem)


def _check_policies(model: nn.Module, dedication: Dedication) -> None:
    """Requires FSDP2's policies around leaves to be dedicate_params' policy, if FSDP2 shows them."""
    around: dict[nn.Module, tuple[str, MixedPrecisionPolicy]] = {}  # by module, of the innermost FSDPModule
    for path, holder in model.named_modules():  # outer modules come before inner ones
        found = getattr(getattr(holder, "_get_fsdp_state", lambda: None)(), "_mp_policy", None)
        if isinstance(found, MixedPrecisionPolicy):
            around |= dict.fromkeys(holder.modules(), (clean_name(path) or "(root)", found))
    for leaf in dedication.leaves:
        for place in leaf.places:
            if place.module not in around and dedication.mp_policy.output_dtype is not None:
                raise ValueError(
                    f"Muon: mp_policy: output_dtype: expected None, because no fully_shard is around '{leaf.name}', "
                    f"which would cast outputs; got {dedication.mp_policy.output_dtype}."
                )
            path, theirs = around.get(place.module, ("", dedication.mp_policy))
            given, used = (dtypes_of(policy, leaf.parameter.dtype) for policy in (dedication.mp_policy, theirs))
            if given != used:
                raise ValueError(
                    f"Muon: mp_policy: '{leaf.name}' computes and reduces in {given[0]} and {given[1]} by "
                    f"dedicate_params, and its module '{path}' in {used[0]} and {used[1]} by fully_shard. Expected: "
                    "the same mp_policy for both."
                )
