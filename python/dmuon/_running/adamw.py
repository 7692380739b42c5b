"""AdamW beside Muon: torch's AdamW over the groups of an outer optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from dmuon._setup.hyperparameters import adamw_moments, rate_of

# Without torch.optim's hooks, which must see one step for each step of the outer optimizer.
_step = inspect.unwrap(torch.optim.AdamW.step)


class InnerAdamW:
    """Runs torch's AdamW on groups and the state of an outer optimizer, which users read, change and replace."""

    def __init__(self) -> None:
        self._adamw: torch.optim.AdamW | None = None

    def complete(self, group: dict[str, Any]) -> None:
        """Gives a group of the outer optimizer the options of AdamW that it lacks."""
        known = _get_fused_kernels_supported_devices()
        on_fused_device = all(p.is_floating_point() and p.device.type in known for p in group["params"])
        group.setdefault("fused", True if on_fused_device else None)
        completed = torch.optim.AdamW([group])
        self._adamw = self._adamw or completed

    def make_state(self, groups: Iterable[dict[str, Any]], state: Any) -> None:
        """Makes what parameters lack of AdamW's state, so that it can be saved and loaded: zeros."""
        for group in groups:
            for parameter in [parameter for parameter in group["params"] if parameter.requires_grad]:
                of_parameter = state.setdefault(parameter, {})
                if "step" not in of_parameter:
                    device = _device_of_step(group, parameter)
                    of_parameter["step"] = torch.zeros((), dtype=torch.float32, device=device)
                for name in adamw_moments(group):
                    if name not in of_parameter:
                        of_parameter[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def prepare(self, groups: Sequence[dict[str, Any]], state: Any) -> None:
        """Does what a step needs before anything moves: completes groups and state, and casts and moves moments.

        A moment gets the dtype and device of its parameter, which may have been cast or moved. It may keep the dtype of
        the gradient.
        """
        for group in groups:
            if self._adamw is not None and not self._adamw.defaults.keys() <= group.keys():  # the user's own dict
                self.complete(group)
        self.make_state(groups, state)  # amsgrad may be new
        for group in groups:
            names = adamw_moments(group)
            for parameter in [parameter for parameter in group["params"] if parameter.grad is not None]:
                of_parameter, device = state.get(parameter, {}), parameter.device
                dtypes = parameter.dtype, parameter.grad.dtype
                for name in names:
                    moment = of_parameter.get(name)  # a frozen parameter may have none yet
                    if moment is not None and (moment.dtype not in dtypes or moment.device != device):
                        of_parameter[name] = moment.to(parameter)

    def step(self, groups: Sequence[dict[str, Any]], state: Any, applies: torch.Tensor) -> None:
        """Updates parameters that have a gradient, unless `applies`, a [] bool, is false. `prepare` comes before.

        Fused kernels on the device of `applies` read it themselves. Otherwise the host reads it and waits for the
        device.
        """
        if self._adamw is None:
            return
        parts = [part for group in groups for part in _parts_of(group, state)]
        for part in parts:
            for parameter in part["params"]:
                if "step" in (of_parameter := state.get(parameter, {})):
                    of_parameter["step"] = of_parameter["step"].to(_device_of_step(part, parameter))
        self._adamw.param_groups, self._adamw.state = parts, state
        if all(part["fused"] and part["params"][0].device == applies.device for part in parts):
            # In the form of torch.amp.GradScaler.
            self._adamw.found_inf = applies.logical_not().float()  # type: ignore[attr-defined]
            try:
                _step(self._adamw)
            finally:
                del self._adamw.found_inf  # type: ignore[attr-defined]
        elif applies:
            _step(self._adamw)


def _parts_of(group: dict[str, Any], state: Any) -> Iterator[dict[str, Any]]:
    """Yields a group for each kind of parameters, because a fused or foreach kernel updates one kind at once.

    The kind is the mesh of DTensors, None of plain tensors, the device, and whether the fused kernel may take the
    parameter.
    """
    kinds: dict[Any, list[Any]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds.setdefault((mesh, parameter.device, _may_fuse(parameter, state)), []).append(parameter)
    lr = rate_of(group)
    for (_, _, may_fuse), parameters in kinds.items():
        yield {**group, "params": parameters, "lr": lr, "fused": group["fused"] and may_fuse}


def _may_fuse(parameter: torch.Tensor, state: Any) -> bool:
    """True if gradient and moments lie in memory as the parameter does: fused kernels of CPUs ignore strides.

    Moments of a parameter with gaps have none.
    """
    if parameter.grad is None or "exp_avg" not in (of_parameter := state.get(parameter, ())):
        return True
    strides, of_gradient, of_moment = (t.stride() for t in (parameter, parameter.grad, of_parameter["exp_avg"]))
    if strides == of_gradient == of_moment:
        return True
    long = [dim for dim, size in enumerate(parameter.shape) if size != 1]  # strides of the others mean nothing
    return all(strides[dim] == of_gradient[dim] == of_moment[dim] for dim in long)


def _device_of_step(group: dict[str, Any], parameter: torch.Tensor) -> torch.device:
    """Returns where torch's kernels look for the count of a parameter's steps."""
    return parameter.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
