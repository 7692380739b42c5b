"""AdamW beside Muon: torch's AdamW over the groups of an outer optimizer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from dmuon._setup.hyperparameters import adamw_moments

# Without torch.optim's hooks, which must see one step for each step of the outer optimizer.
_step = inspect.unwrap(torch.optim.AdamW.step)


class InnerAdamW:
    """Runs torch's AdamW on the groups and the state of an outer optimizer, which users read and change."""

    def __init__(self) -> None:
        self._adamw: torch.optim.AdamW | None = None

    def add(self, group: dict[str, Any], state: Any) -> None:
        """Adds a group of the outer optimizer, which has this state."""
        known = _get_fused_kernels_supported_devices()
        on_fused_device = all(p.is_floating_point() and p.device.type in known for p in group["params"])
        one_kind = len({kind_of(p) for p in group["params"]}) <= 1
        group.setdefault("fused", True if on_fused_device and one_kind else None)
        group.setdefault("foreach", None if one_kind else False)
        if self._adamw is None:
            self._adamw = torch.optim.AdamW([group])
            self._adamw.state = state
        else:
            self._adamw.add_param_group(group)

    def use(self, state: Any) -> None:
        """Goes on with this state of the outer optimizer, which the user may have replaced."""
        if self._adamw is not None:
            self._adamw.state = state

    def make_state(self) -> None:
        """Makes AdamW's first state for parameters that have made no step, so that it can be saved."""
        for group in self._adamw.param_groups if self._adamw is not None else ():
            on_device = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                of_parameter = self._adamw.state[parameter]  # type: ignore[union-attr]
                if of_parameter or not parameter.requires_grad:
                    continue
                step_device = parameter.device if on_device else torch.device("cpu")
                of_parameter["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
                for name in adamw_moments(group):
                    of_parameter[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def step(self, applies: torch.Tensor) -> None:
        """Updates parameters that have a gradient, unless `applies`, a [] bool, is false.

        Fused kernels on the device of `applies` read it themselves. Otherwise the host reads it and waits for the
        device.
        """
        if self._adamw is None:
            return
        below = [(group, group["lr"]) for group in self._adamw.param_groups if float(group["lr"]) < 0]  # by rounding
        for group, lr in below:
            group["lr"] = torch.zeros_like(lr) if isinstance(lr, torch.Tensor) else 0.0
        try:
            self._step(applies)
        finally:
            for group, lr in below:
                group["lr"] = lr

    def _step(self, applies: torch.Tensor) -> None:
        assert self._adamw is not None
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


def kind_of(parameter: Any) -> Any:
    """Returns what is alike of parameters that one kernel may update: the mesh of DTensors, None of plain tensors."""
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
