"""Saves the state of Muon, and checks a saved state, of Muon or of torch's optimizers, before Muon loads it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dmuon._saving.fits import form, misfit
from dmuon._saving.owned_shards import MASTER, OwnedShards
from dmuon._saving.saved_algorithm import SavedAlgorithm, algorithm_to_save, views_to_save
from dmuon._saving.saved_matrices import members_of
from dmuon._setup.hyperparameters import adamw_moments, check_group, resolved_coefficients, rule_of, settings_of
from dmuon._setup.leaf import Leaf
from dmuon._setup.slices import cut_like

_LOAD = "Muon.load_state_dict"
_OF_THIS_MACHINE = ("fused", "foreach", "capturable", "differentiable")  # a saved group does not change these


@dataclasses.dataclass
class LoadedState:
    """The contents of a state dict that fits."""

    groups: list[dict[str, Any]]  # whole groups: keys that were not saved are as now; "params" as saved
    # What torch loads: AdamW's state, and what the user has put beside owners' tensors, by the number of the parameter;
    # and what the user has put under other keys.
    by_torch: dict[Any, Any]
    owned: dict[str, dict[int, torch.Tensor]]  # owners' tensors, by name and by the index of the leaf
    anew: list[int]  # leaves whose states begin anew
    absent: list[str]  # names of matrices, and of parameters that are frozen now, whose states are not there


def fitting_state(
    saved: Any,
    groups: Sequence[dict[str, Any]],
    leaf_of: Mapping[Any, int],
    names: Mapping[int, str],
    shards: OwnedShards,
    first_lrs: Mapping[str, Any],
    facts: list[str],
) -> LoadedState:
    """Checks a state dict against an optimizer.

    Args:
        saved: a state dict, in the form of torch's optimizers.
        groups: the optimizer's present groups.
        leaf_of: the index of every leaf, by its placeholder.
        names: the names of parameters, by id.
        shards: checks the values of leaves.
        first_lrs: the constructor's learning rates, by algorithm.
        facts: gets lines that must be equal on all ranks.

    Raises:
        ValueError: the state does not fit. Names the parameter or group.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise ValueError(
            f"{_LOAD}: state_dict: expected a dict with 'state' and 'param_groups', got {_described(saved)}"
        )
    sizes = [[len(group["params"]) for group in side] for side in (groups, saved["param_groups"])]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{_LOAD}: param_groups: expected groups of {sizes[0]} parameters, as the model has them, got {sizes[1]}: "
            "those of another model, of another depth say, of other groups, or of another optimizer, of which "
            "docs/checkpoints.md#move takes over what it can"
        )
    pairs = enumerate(zip(groups, saved["param_groups"], strict=True))
    merged = [_merged(number, *pair, first_lrs[pair[0]["algorithm"]]) for number, pair in pairs]
    facts += [f"group {settings_of(group)}" for group in merged]
    of_user = {key: value for key, value in saved["state"].items() if not isinstance(key, int)}
    numbers = {str(number): number for group in saved["param_groups"] for number in group["params"]}
    if (wrong := next((key for key in of_user if numbers.get(key, key) != key), None)) is not None:
        raise ValueError(f"{_LOAD}: state: expected numbers of parameters as keys, got the text {wrong!r}, as JSON has")
    loaded = LoadedState(merged, of_user, {name: {} for name in (*shards.states, MASTER)}, [], [])
    fresh = not saved["state"]  # the optimizer had made no step
    for group, theirs, now in zip(groups, saved["param_groups"], merged, strict=True):
        for parameter, number in zip(group["params"], theirs["params"], strict=True):
            state = saved["state"].get(number)
            name = names.get(id(parameter), "?")
            facts.append(f"'{name}' {_described(state)}")
            is_absent = state in (None, {})
            if parameter in leaf_of:
                if is_absent:
                    loaded.anew.append(leaf_of[parameter])
                else:
                    loaded.by_torch[number] = _read_leaf(loaded, leaf_of[parameter], name, state, shards)
            elif not is_absent:
                loaded.by_torch[number] = _checked_adamw(parameter, name, state, now)
            if is_absent and not fresh and (parameter in leaf_of or not parameter.requires_grad):
                loaded.absent.append(name)
    return loaded


def saved_state(
    live: Any, groups: Sequence[dict[str, Any]], leaf_of: Mapping[Any, int], shards: OwnedShards
) -> defaultdict[Any, dict[str, Any]]:
    """Returns the state of the `groups` with DTensors in place of owners' tensors in `live`. Collective.

    torch cannot number a parameter that was taken out of its group.
    """
    grouped = {parameter for group in groups for parameter in group["params"]}
    saved = defaultdict(dict, {parameter: dict(state) for parameter, state in live.items() if parameter in grouped})
    saved.update((key, value) for key, value in live.items() if not isinstance(key, torch.Tensor))  # the user's
    for name in (*shards.states, MASTER):
        having = [parameter for parameter in leaf_of if name in saved.get(parameter, ())]
        found = shards.read([leaf_of[parameter] for parameter in having], name, torch.float32)
        for parameter, value in zip(having, found, strict=True):
            saved[parameter][name] = value
    return saved


def with_saved_groups(
    packed: dict[str, Any], groups: Sequence[dict[str, Any]], leaf_of: Mapping[Any, int], leaves: Sequence[Leaf]
) -> dict[str, Any]:
    """Returns a state dict of `torch.optim.Optimizer` with groups to save in place of the live `groups`' values."""
    members = members_of(groups, leaf_of, leaves)
    members = members if len(members) > 1 else {}
    views, numbered = views_to_save(leaves), enumerate(packed["param_groups"])
    saved = [_saved_group(group, views, members.get(number, "")) for number, group in numbered]
    return {**packed, "param_groups": saved}


def _saved_group(group: dict[str, Any], views: Mapping[str, str], members: str) -> dict[str, Any]:
    """Returns a group for a state dict, with values that torch.distributed.checkpoint and torch.optim.Muon can read.

    A dtype becomes its name. A name of coefficients becomes one (a, b, c), if they are equal in every step. For the
    algorithm see `saved_algorithm.py`.
    """
    saved = dict(group)
    if group["algorithm"] == "muon":
        is_cautious = group.get("cautious_weight_decay", False)
        saved["algorithm"] = algorithm_to_save(rule_of(group), is_cautious, views, members)
    for key, value in group.items():
        if isinstance(value, torch.dtype):
            saved[key] = str(value)
        if key == "skipped_steps":
            saved[key] = int(value)  # the live count is on the device
    if isinstance(name := saved.get("ns_coefficients"), str):
        rows = set(resolved_coefficients(name, saved["ns_steps"]))
        saved["ns_coefficients"] = next(iter(rows)) if len(rows) == 1 else name
    return saved


def _merged(number: int, current: dict[str, Any], saved: dict[str, Any], first_lr: Any) -> dict[str, Any]:
    expected = rule_of(current) if current["algorithm"] == "muon" else current["algorithm"]
    keys = saved.keys() - {"params", "param_names"}
    algorithm = SavedAlgorithm.of(saved)
    got = algorithm.name or ("adamw" if "betas" in keys else "muon" if "ns_steps" in keys else "")
    if got == "adamw" and saved.get("decoupled_weight_decay") is False:
        got = "adam"
    if keys and got != expected:
        raise ValueError(
            f"{_LOAD}: param_groups[{number}]: expected a group of algorithm '{expected}', got "
            f"'{got or 'another'}' with {sorted(keys)}"
        )
    merged = {**current, **saved, "algorithm": current["algorithm"]}
    merged |= {key: current[key] for key in (*_OF_THIS_MACHINE, "rule") if key in current}
    if algorithm.is_cautious or (algorithm.listed and "cautious_weight_decay" in merged):  # not of torch's optimizers
        merged["cautious_weight_decay"] = algorithm.is_cautious
    if isinstance(merged.get("ns_dtype"), str):
        merged["ns_dtype"] = getattr(torch, merged["ns_dtype"].removeprefix("torch."), merged["ns_dtype"])
    check_group(merged, f"{_LOAD}: param_groups[{number}]", first_lr)
    return merged


def _read_leaf(loaded: LoadedState, index: int, name: str, state: Any, shards: OwnedShards) -> dict[str, Any]:
    """Adds owners' tensors to `loaded`. Returns the rest of the state, which is the user's."""
    of_adamw = {"step", "exp_avg", "exp_avg_sq"}  # beside Muon's if a trainer has filled up a former AdamW's
    if isinstance(state, Mapping) and of_adamw <= state.keys() and of_adamw.isdisjoint(shards.states):
        raise ValueError(
            f"{_LOAD}: state of '{name}': expected Muon's, got AdamW's, {_described(state)}: the checkpoint is of "
            "another optimizer. Expected: its weights, and the states of what AdamW goes on to update, by "
            "docs/checkpoints.md#move. A trainer can begin from the weights alone."
        )
    for key in shards.states:
        if not isinstance(state, Mapping) or key not in state:
            raise ValueError(
                f"{_LOAD}: state of '{name}': expected '{key}', got {_described(state)}. Without its entry in 'state', "
                "as of an AdamW before, it begins anew."
            )
    for key, owned in loaded.owned.items():
        if key not in state or (key == MASTER and shards.dtype_of(index) == torch.float32):
            continue
        if problem := shards.problem(index, state[key], key):
            raise ValueError(f"{_LOAD}: '{key}' of '{name}': {problem}")
        owned[index] = state[key]
    return {key: value for key, value in state.items() if key not in loaded.owned}


def _checked_adamw(parameter: torch.Tensor, name: str, state: Any, group: dict[str, Any]) -> dict[str, Any]:
    moments = adamw_moments(group)
    expected = {"step", *moments}
    if not isinstance(state, Mapping) or not expected <= state.keys():
        raise ValueError(f"{_LOAD}: state of '{name}': expected one with {sorted(expected)}, got {_described(state)}")
    moments_of_parameter = {}
    for key in moments:
        value = state[key]
        if problem := misfit(parameter, value):
            raise ValueError(f"{_LOAD}: '{key}' of '{name}': {problem}")
        value = cut_like(value, parameter)
        if not isinstance(parameter, DTensor) and value.stride() != parameter.stride():
            value = torch.zeros_like(parameter, dtype=value.dtype).copy_(value)  # as fused kernels want it
        moments_of_parameter[key] = value
    return {**state, **moments_of_parameter, "step": torch.as_tensor(state["step"], dtype=torch.float32)}


def _described(value: Any) -> str:
    if not isinstance(value, Mapping):
        return type(value).__name__
    return f"one with {sorted(f'{key} ({_kind(part)})' for key, part in value.items())}"


def _kind(value: Any) -> str:
    return form(value) if isinstance(value, torch.Tensor) else "no tensor"
