"""Makes every weight whole, on every rank, for a while."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._running.runtime import Runtime, runtime_of
from dmuon._setup.agreement import ENDS, agreement
from dmuon._setup.attributes import give_attributes
from dmuon._setup.checksum import checksum
from dmuon._setup.option_values import require
from dmuon._setup.place import clean_name, joined
from dmuon._setup.sharded import is_of_fsdp2
from dmuon._setup.slices import cut_like, local_part


@contextmanager
def full_params(model: nn.Module, writeback: bool = False) -> Iterator[None]:
    """Makes every parameter of `model` whole on every rank: a plain nn.Parameter with the master's values.

    Collective over the mesh on entry and exit. `state_dict()` and `load_state_dict()` work inside, a forward does not.
    Owned matrices have their original dtype, cast from the fp32 master. All others are copies, except parameters of
    other classes than nn.Parameter. Every rank needs memory for the whole model and one parameter more. To get a whole
    model on rank 0 alone, call
    `torch.distributed.checkpoint.state_dict.get_model_state_dict` with `full_state_dict` and `cpu_offload`.

    Args:
        model: a model with dmuon.Muon.
        writeback: True to write changed values back at exit, unless the block raises. Each rank writes its own values
            to its masters and shards, so change them alike on all ranks. The fp32 master of an unchanged matrix stays.

    Raises:
        ValueError: the model has no dmuon.Muon yet, or the context is entered twice. With writeback, also if ranks
            have changed values differently; then nothing is written.
    """
    runtime = runtime_of(model, "full_params")
    if runtime.access.whole:
        raise ValueError("full_params: model: expected one context at a time, got a nested one")
    runtime.meet("full_params(writeback=True)" if writeback is True else "full_params", averaged=writeback is True)
    with agreement(runtime.ranks, "full_params") as facts:
        require("full_params", isinstance(writeback, bool), "writeback", "True or False", writeback)
        facts.append(f"writeback={writeback}")
    swapped = _other_places(model)
    wholes = [
        nn.Parameter(runtime.gathered(index, "master").to(placeholder.dtype), placeholder.requires_grad)
        for index, placeholder in enumerate(runtime.placeholders)
    ]
    for index in runtime.shards.without_values if writeback else ():
        wholes[index].detach().fill_(math.nan)  # until someone writes it, zeros too
    parameters = [parameter for _, _, _, parameter in swapped]
    others = {id(p): nn.Parameter(_copy_of(p), p.requires_grad) for p in parameters}
    for held, whole in (*zip(runtime.placeholders, wholes, strict=True), *((p, others[id(p)]) for p in parameters)):
        give_attributes(whole, vars(held))
    hooks = _load_hooks([module for _, module, _, _ in swapped])
    try:
        try:
            runtime.access.whole, runtime.access.writes_back, runtime.access.was_loaded = True, writeback, False
            for held, key, _ in hooks:
                del held[key]
            for leaf, whole in zip(runtime.leaves, wholes, strict=True):
                for place in leaf.places:
                    place.show_whole(whole)
            for _, module, attribute, parameter in swapped:
                module._parameters[attribute] = others[id(parameter)]
            try:
                yield
            except ENDS as error:
                if writeback:  # the other ranks are about to write back and must not
                    with suppress(*ENDS), agreement(runtime.ranks, "full_params"):
                        raise error
                raise
            if writeback:
                _write_back(runtime, swapped)
        finally:
            _leave(runtime, swapped, hooks)
    finally:  # an interrupt may have come at any line of the first time
        _leave(runtime, swapped, hooks)


# The dict that holds a hook, its key and the hook.
_Hook = tuple[dict[int, Any], int, Any]


def _load_hooks(modules: list[nn.Module]) -> list[_Hook]:
    """Returns FSDP2's hooks after load_state_dict: they expect the shards that full_params replaces."""
    return [
        (held, key, hook)
        for held in {id(module): module._load_state_dict_post_hooks for module in modules}.values()
        for key, hook in held.items()
        if is_of_fsdp2(hook)
    ]


def _leave(runtime: Runtime, swapped: list[_Other], hooks: list[_Hook]) -> None:
    """Undoes what `full_params` has shown, or what an interrupted call of this has left of it."""
    if not runtime.access.whole:
        return
    for leaf in runtime.leaves:
        for place in leaf.places:
            place.hide_whole()
    for _, module, attribute, parameter in swapped:
        module._parameters[attribute] = parameter
    for held, key, hook in hooks:
        held[key] = hook
    runtime.access.whole = False


# Name, module, attribute and parameter. Any: no type describes a DTensor that is an nn.Parameter.
_Other = tuple[str, nn.Module, str, Any]


def _other_places(model: nn.Module) -> list[_Other]:
    """Returns the places of all that is not owned. Parameters of other classes stay in place."""
    return [
        (clean_name(joined(path, attribute)), module, attribute, parameter)
        for path, module in model.named_modules()
        for attribute, parameter in module._parameters.items()
        if isinstance(parameter, DTensor) or type(parameter) is nn.Parameter
    ]


def _copy_of(parameter: torch.Tensor) -> torch.Tensor:
    detached = parameter.detach()
    whole = detached.full_tensor() if isinstance(detached, DTensor) else detached
    return whole.clone() if whole.data_ptr() == local_part(parameter).data_ptr() else whole


@torch.no_grad()
def _write_back(runtime: Runtime, swapped: list[_Other]) -> None:
    wanted = "inside of writeback=True the same values written on every rank"
    with agreement(runtime.ranks, "full_params", wanted) as facts:
        edited = [
            _current(leaf.places[0].module, leaf.places[0].attribute, leaf.name, leaf.shape) for leaf in runtime.leaves
        ]
        wholes = [_current(module, attribute, name, parameter.shape) for name, module, attribute, parameter in swapped]
        names = [*(leaf.name for leaf in runtime.leaves), *(name for name, _, _, _ in swapped)]
        unwritten = {index for index in runtime.shards.without_values if _is_unwritten(edited[index], names[index])}
        pairs = zip(names, (*edited, *wholes), strict=True)
        facts += [f"'{name}' of values with checksum {int(checksum(whole)):x}" for name, whole in pairs]
    new_parts = [local_part(cut_like(whole, place[-1])) for place, whole in zip(swapped, wholes, strict=True)]
    for index, new in enumerate(edited):
        if index in unwritten:
            continue
        runtime.shards.without_values.discard(index)
        slices = runtime.leaves[index].slices
        own = new if slices is None else slices.of_rank(new, runtime.ranks.tensor_rank)
        # A bf16 model's fp32 master holds more than the bf16 values shown: write only changed elements.
        for part in runtime.transfers.owned_parts(index, "master"):
            master, elements = part.tensor, slice(part.elements.begin, part.elements.end)
            values = own.reshape(-1)[elements].view(master.shape).to(master.device)
            master.copy_(torch.where(master.to(values.dtype) == values, master, values))
    for (_, _, _, parameter), new_part in zip(swapped, new_parts, strict=True):
        local_part(parameter).copy_(new_part)
    runtime.publish(replaced=True)
    if runtime.access.was_loaded:
        runtime.access.torn.discard("model")


def _is_unwritten(whole: torch.Tensor, name: str) -> bool:
    """True if nobody has written a matrix that had no values. Raises ValueError if it was written in part."""
    missing = int(whole.isnan().sum())
    if 0 < missing < whole.numel():
        expected = "all elements or none written, as it has no values yet"
        raise ValueError(f"full_params: '{name}': expected {expected}, got {missing} that are not")
    return missing == whole.numel()


def _current(module: nn.Module, attribute: str, name: str, shape: torch.Size) -> torch.Tensor:
    parameter = module._parameters.get(attribute)
    if parameter is None or parameter.shape != shape:
        got = "a deleted one" if parameter is None else tuple(parameter.shape)
        raise ValueError(f"full_params: '{name}': expected shape {tuple(shape)}, got {got}")
    return parameter.detach()
