"""A place of a leaf in a model: what stands there, and how that may change."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import NoReturn

import torch
import torch.nn as nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from dmuon._setup.placeholder import TakenOutTensor

# A buffer that stands in a module for a leaf taken out of it, and is cast and moved with the module.
_SENTINEL = "_dmuon_sentinel_"


class State(enum.Enum):
    """What stands at a place.

    WHOLE: a parameter with all its values, before `dedicate_params` and inside `full_params`.
    TAKEN_OUT: no parameter, so that `fully_shard` does not see it, between `dedicate_params` and `Muon`.
    PROVISIONAL: between the two calls too, where the model was built on the meta device and has memory by now: can be
        initialised, and is kept by one rank.
    PLACEHOLDER: the true shape and dtype without values, whenever the unit does not compute.
    WEIGHT: a view of the unit's packed buffer, while the unit computes.
    """

    __hash__ = object.__hash__  # Enum's own is written in Python, and every use of a unit changes states

    WHOLE = enum.auto()
    TAKEN_OUT = enum.auto()
    PROVISIONAL = enum.auto()
    PLACEHOLDER = enum.auto()
    WEIGHT = enum.auto()


_LEGAL = {
    (State.WHOLE, State.TAKEN_OUT),
    (State.TAKEN_OUT, State.PROVISIONAL),
    (State.PROVISIONAL, State.TAKEN_OUT),
    (State.TAKEN_OUT, State.PLACEHOLDER),
    (State.PROVISIONAL, State.PLACEHOLDER),
    (State.PLACEHOLDER, State.WEIGHT),
    (State.WEIGHT, State.WEIGHT),  # a unit that is used again before its use has ended
    (State.WEIGHT, State.PLACEHOLDER),
    (State.PLACEHOLDER, State.WHOLE),
    (State.WHOLE, State.PLACEHOLDER),
}


@dataclasses.dataclass(eq=False)
class Place:
    """An attribute of a module that holds a leaf; a tied leaf has several.

    No other code changes what the module holds there. A transition that is not in `_LEGAL` is a bug of dmuon and
    raises RuntimeError; then nothing has changed.
    """

    path: str  # of the module
    module: nn.Module
    attribute: str
    state: State = State.WHOLE
    provisional: nn.Parameter | None = None  # what can be initialised, once there is memory, until `put_back`
    _taken_out: TakenOutTensor | None = None
    _placeholder: nn.Parameter | None = None
    _weight: nn.Parameter | None = None

    @property
    def name(self) -> str:
        """Of the parameter there, in the model without wrappers."""
        return clean_name(joined(self.path, self.attribute))

    def take_out(self) -> None:
        """Leaves a sentinel where the parameter was."""
        self._enter(State.TAKEN_OUT)
        parameter = self.module._parameters.pop(self.attribute)
        assert parameter is not None
        sentinel = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        self.module.register_buffer(_SENTINEL + self.attribute, sentinel, persistent=False)
        # For who reads the attribute, which is no parameter now.
        self._taken_out = TakenOutTensor(self.name, parameter.shape, parameter.dtype, parameter.device, None)
        self.module.__dict__[self.attribute] = self._taken_out

    def sentinel(self) -> torch.Tensor:
        """What has followed the module's casts and moves since `take_out`; until `put_back`."""
        found = self.module._buffers[_SENTINEL + self.attribute]
        assert found is not None
        return found

    def show_provisional(self, parameter: nn.Parameter) -> None:
        """Puts in what can be initialised."""
        self._enter(State.PROVISIONAL)
        self.module.__dict__.pop(self.attribute, None)
        self._taken_out = None
        self.provisional = self.module._parameters[self.attribute] = parameter

    def hide_provisional(self) -> None:
        """Takes it out again, so that a cast or move of the module does not see it."""
        if self.state is State.PROVISIONAL and not self.is_replaced():
            self._enter(State.TAKEN_OUT)
            del self.module._parameters[self.attribute]

    def is_replaced(self) -> bool:
        """Between the calls: whether the user has put another parameter there, or taken out what stands for it."""
        expected = self.provisional if self.state is State.PROVISIONAL else None
        beside = self.module.__dict__.get(self.attribute)  # where what is no parameter goes
        return self.module._parameters.get(self.attribute) is not expected or beside is not self._taken_out

    def put_back(self, placeholder: nn.Parameter, weight: nn.Parameter) -> None:
        """Ends the time without a parameter; from now on the two take turns."""
        self._enter(State.PLACEHOLDER)
        self.provisional = self._taken_out = None
        self.module.__dict__.pop(self.attribute, None)
        self._placeholder, self._weight = placeholder, weight
        self.module._buffers.pop(_SENTINEL + self.attribute, None)
        self.module._non_persistent_buffers_set.discard(_SENTINEL + self.attribute)
        self.module._parameters[self.attribute] = placeholder

    def show_weight(self) -> None:
        """Puts the weight in.

        Raises:
            ValueError: the user has put something else there.
        """
        self._enter(State.WEIGHT)
        placeholder, weight = self._placeholder, self._weight
        assert placeholder is not None and weight is not None
        if weight.requires_grad != placeholder.requires_grad:
            weight.requires_grad_(placeholder.requires_grad)
        held = self.module._parameters.get(self.attribute)
        if held is not placeholder and held is not weight:
            self.state = State.PLACEHOLDER
            raise ValueError(
                f"dmuon: '{self.name}' was {'deleted' if held is None else 'replaced'} after dmuon.Muon, which would "
                "go on with the weight of before. Expected: write new values inside `with dmuon.full_params(model, "
                "writeback=True)`; take layers out before dedicate_params."
            )
        self.module._parameters[self.attribute] = weight

    def show_placeholder(self) -> None:
        """Puts the placeholder in. What the user has put in a weight's place stays: `show_weight` will refuse it."""
        was = self.state
        if self._placeholder is None:
            self._refuse(State.PLACEHOLDER)
        self._enter(State.PLACEHOLDER)
        if was is State.WHOLE or self.module._parameters.get(self.attribute) is self._weight:
            self.module._parameters[self.attribute] = self._placeholder

    def show_whole(self, parameter: nn.Parameter) -> None:
        """Puts a parameter with all values in, until the placeholder returns."""
        self._enter(State.WHOLE)
        self.module._parameters[self.attribute] = parameter

    def _enter(self, state: State) -> None:
        if (self.state, state) not in _LEGAL:
            self._refuse(state)
        self.state = state

    def _refuse(self, state: State) -> NoReturn:
        raise RuntimeError(f"dmuon bug: '{self.name}': expected no change from {self.state} to {state}")


def joined(path: str, attribute: str) -> str:
    """The name of what a module at a path holds; the model itself is at ""."""
    return f"{path}.{attribute}" if path else attribute


def clean_name(path: str) -> str:
    """The name of a module or parameter in the model without the wrappers of checkpoints, FSDP1 and torch.compile."""
    return clean_tensor_name(f"{path}.").replace("_orig_mod.", "").removesuffix(".")


def holds_sentinel(module: nn.Module) -> bool:
    """Whether a leaf of the module itself is taken out."""
    return any(name.startswith(_SENTINEL) for name in module._buffers)


def restore_order(module: nn.Module, names: Iterable[str]) -> None:
    """Brings the module's parameters into the order of `names`, which taking out and putting back has changed."""
    for name in names:
        if name in module._parameters:  # the user may have removed it
            module._parameters[name] = module._parameters.pop(name)
