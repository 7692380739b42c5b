"""AdamW beside Muon: the groups that an optimizer begins with, and torch's AdamW over them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from dmuon._setup.dedication import Dedication
from dmuon._setup.hyperparameters import adamw_moments, check_group, settings_of
from dmuon._setup.place import clean_name
from dmuon._setup.shown import shown

# Without torch.optim's hooks, which must see one step for each step of the outer optimizer.
_step = inspect.unwrap(torch.optim.AdamW.step)


class InnerAdamW:
    """Runs torch's AdamW on the groups and the state of an outer optimizer, which users read and change."""

    def __init__(self) -> None:
        self._adamw: torch.optim.AdamW | None = None

    def add(self, group: dict[str, Any], state: Any) -> None:
        """Adds a group of the outer optimizer. `state` is always the same object."""
        known = _get_fused_kernels_supported_devices()
        on_fused_device = all(p.is_floating_point() and p.device.type in known for p in group["params"])
        one_kind = len({isinstance(p, DTensor) for p in group["params"]}) <= 1
        group.setdefault("fused", True if on_fused_device and one_kind else None)
        group.setdefault("foreach", None if one_kind else False)
        if self._adamw is None:
            self._adamw = torch.optim.AdamW([group])
            self._adamw.state = state
        else:
            self._adamw.add_param_group(group)

    def make_state(self) -> None:
        """Makes AdamW's first state for parameters that have made no step, so that it can be saved."""
        for group in self._adamw.param_groups if self._adamw is not None else ():
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                state = self._adamw.state[parameter]  # type: ignore[union-attr]
                if state or not parameter.requires_grad:
                    continue
                step_device = parameter.device if on_device else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
                for name in adamw_moments(group):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def step(self, applies: torch.Tensor) -> None:
        """Updates parameters that have a gradient, unless `applies`, a [] bool, is false.

        Fused kernels on the device of `applies` read it themselves. Otherwise the host reads it and waits for the
        device.
        """
        if self._adamw is None:
            return
        groups = [group for group in self._adamw.param_groups if group["params"]]
        if all(group["fused"] and group["params"][0].device == applies.device for group in groups):
            # In the form of torch.amp.GradScaler.
            self._adamw.found_inf = applies.logical_not().float()  # type: ignore[attr-defined]
            try:
                _step(self._adamw)
            finally:
                del self._adamw.found_inf  # type: ignore[attr-defined]
        elif applies:
            _step(self._adamw)


def checked_adamw_groups(
    model: nn.Module, dedication: Dedication, given: Any, defaults: dict[str, Any], facts: list[str]
) -> list[dict[str, Any]]:
    """Returns groups of the parameters that no given group names, sharded and plain ones apart; then the given groups.

    Args:
        model: a model whose leaves are taken out, or provisional.
        dedication: the model's dedication.
        given: groups in torch's form: "params" (a parameter or several, named or not) and options.
        defaults: the options that a group does not name.
        facts: gets a line for each group.

    Raises:
        ValueError: `given` is no list of groups; or a group has a bad hyperparameter, or a parameter that AdamW does
            not update or that another group names.
    """
    if not isinstance(given, list | tuple):
        raise ValueError(f"Muon: adamw_groups: expected a list of groups, got {_kind(given)}")
    leaf_names = {
        id(parameter): leaf.name
        for leaf in dedication.leaves
        for parameter in (leaf.parameter, leaf.places[0].provisional)
    }
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    taken: set[int] = set()
    groups = []
    for index, options in enumerate(given):
        where = f"Muon: adamw_groups[{index}]"
        if not isinstance(options, dict) or "params" not in options:
            raise ValueError(f"{where}: expected a dict with 'params', got {_kind(options)}")
        if options.get("algorithm", "adamw") != "adamw":
            raise ValueError(f"{where}: algorithm: expected 'adamw' or nothing, got {shown(options['algorithm'])}")
        params = _listed(options["params"], where)
        for number, parameter in enumerate(params):
            problem = None
            if id(parameter) in leaf_names:
                problem = f"'{leaf_names[id(parameter)]}', which Muon updates (dedicate_params(select=...) decides)"
            elif id(parameter) not in names:
                problem = f"{shown(parameter)}, which is no parameter of the model as it is after fully_shard"
            elif id(parameter) in taken:
                problem = f"'{names[id(parameter)]}' twice"
            if problem:
                raise ValueError(
                    f"{where}: params[{number}]: expected parameters that AdamW updates, each once, got {problem}"
                )
            taken.add(id(parameter))
        group = {**defaults, **options, "params": params, "algorithm": "adamw"}
        check_group(group, where)
        facts.append(f"adamw_groups[{index}] {settings_of(group)} of {[names[id(p)] for p in params]}")
        groups.append(group)
    # Fused AdamW updates plain tensors or DTensors, not both at once.
    named = taken | leaf_names.keys()
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in named]
    halves = [[p for p in rest if isinstance(p, DTensor) == sharded] for sharded in (True, False)]
    return [{"params": half, "algorithm": "adamw", **defaults} for half in halves if half] + groups


def _listed(params: Any, where: str) -> list[torch.Tensor]:
    items = list(params) if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) else [params]
    found: list[Any] = [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in items]
    for number, item in enumerate(found):
        if not isinstance(item, torch.Tensor):
            raise ValueError(f"{where}: params[{number}]: expected a parameter of the model, got {shown(item)}")
    return found


def _kind(value: Any) -> str:
    """Describes a value that should be a group, or a list of groups."""
    return f"a dict with {sorted(map(str, value))}" if isinstance(value, dict) else type(value).__name__
