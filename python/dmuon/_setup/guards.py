"""What a model refuses between dedicate_params and Muon, while no module holds its leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch.nn as nn

from dmuon._setup.leaf import Leaf
from dmuon._setup.place import Place, State


class Handle(Protocol):
    """What ends a guard."""

    def remove(self) -> None: ...


def guards(model: nn.Module, leaves: Iterable[Leaf]) -> list[Handle]:
    """From now on nothing uses the model, until Muon puts placeholders where leaves were and removes the handles."""

    def refusing(problem: str) -> Callable[..., None]:
        def refuse(*_: Any) -> None:
            raise ValueError(f"dedicate_params: {problem}")

        return refuse

    refuse_forward = refusing(
        "a forward ran between dedicate_params and Muon. Expected: dedicate_params(model), fully_shard, "
        "dmuon.Muon(model), then the first forward."
    )
    refuse_state = refusing(
        "a state dict was taken or loaded between dedicate_params and Muon. Expected: load weights before "
        "dedicate_params, or after Muon."
    )
    handles: list[Handle] = []
    held: dict[nn.Module, list[Place]] = {}
    for leaf in leaves:
        for place in leaf.places:
            held.setdefault(place.module, []).append(place)
    for module in {model: None, **held}:  # the model itself first, before anything of it is loaded
        handles += [
            module.register_state_dict_pre_hook(refuse_state),
            module.register_load_state_dict_pre_hook(refuse_state),
            module.register_forward_pre_hook(refuse_forward),
        ]
    for module in model.modules():
        places = [place for part in module.modules() for place in held.get(part, ())]
        if places:
            handles.append(_FreezingGuard(module, places))
    handles += [_RegistrationGuard(module, places) for module, places in held.items()]
    return handles


class _FreezingGuard:
    """In the place of a module's `requires_grad_`, which would pass over what is taken out."""

    def __init__(self, module: nn.Module, places: list[Place]) -> None:
        self._module, self._places = module, places
        module.__dict__["requires_grad_"] = self

    def __call__(self, requires_grad: bool = True) -> nn.Module:
        taken_out = [place.name for place in self._places if place.state is State.TAKEN_OUT]
        if taken_out and not requires_grad:
            raise ValueError(
                f"dedicate_params: requires_grad_(False) between dedicate_params and Muon would not reach "
                f"'{taken_out[0]}', which no module holds now. Expected: freeze before dedicate_params, or after Muon."
            )
        same: nn.Module = type(self._module).requires_grad_(self._module, requires_grad)
        return same

    def remove(self) -> None:
        self._module.__dict__.pop("requires_grad_", None)


class _RegistrationGuard:
    """In the place of a module's `register_parameter`, which of what is taken out would only say that it exists."""

    def __init__(self, module: nn.Module, places: list[Place]) -> None:
        self._module, self._places = module, places
        module.__dict__["register_parameter"] = self

    def __call__(self, name: str, param: nn.Parameter | None) -> None:
        for place in self._places:
            if place.attribute == name and name in self._module.__dict__:  # which an assignment has removed
                raise ValueError(
                    f"dedicate_params: register_parameter between dedicate_params and Muon: '{place.name}' is Muon's "
                    "already. Expected: the model as it is trained, with this parameter, at dedicate_params."
                )
        type(self._module).register_parameter(self._module, name, param)

    def remove(self) -> None:
        self._module.__dict__.pop("register_parameter", None)
