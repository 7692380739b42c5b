"""A place of a leaf in a model: its states and their transitions."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

import torch
import torch.nn as nn
from torch.distributed.fsdp._common_utils import clean_tensor_name

from dmuon._setup.attributes import give_attributes
from dmuon._setup.placeholder import TakenOutTensor
from dmuon._setup.ways_out import in_functional_call

# The prefix of a buffer that stands for a leaf taken out of a module, and that is cast and moved with the module.
_SENTINEL = "_dmuon_sentinel_"
CHECKPOINT = "_checkpoint_wrapped_module."  # PyTorch's wrapper of a checkpoint adds it to paths, not to keys of states

T = TypeVar("T")


class State(enum.Enum):
    """The state of a place.

    WHOLE: a parameter with all its values, before `dedicate_params` and inside `full_params`.
    TAKEN_OUT: no parameter, so that `fully_shard` does not see it, between `dedicate_params` and `Muon`.
    PROVISIONAL: a parameter that can be initialised and that one rank stores, also between the two calls, if the model
        was built on the meta device and has memory.
    PLACEHOLDER: the true shape and dtype without values, whenever the unit does not compute. In the model's forward the
        dtype is the one of compute, as that of a weight.
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
    (State.WEIGHT, State.WEIGHT),  # another use of a unit begins before its use has ended
    (State.WEIGHT, State.PLACEHOLDER),
    (State.PLACEHOLDER, State.WHOLE),
    (State.WHOLE, State.PLACEHOLDER),
}


@dataclasses.dataclass(eq=False)
class Place:
    """An attribute of a module that holds a leaf. A tied leaf has several places.

    No other code changes this attribute. A transition that is not in `_LEGAL` is a bug of dmuon: it raises
    RuntimeError and changes nothing.
    """

    path: str  # of the module
    module: nn.Module
    attribute: str
    state: State = State.WHOLE
    provisional: nn.Parameter | None = None  # can be initialised; from the first memory to `put_back`
    _taken_out: TakenOutTensor | None = None
    _placeholder: nn.Parameter | None = None
    _in_forward: nn.Parameter | None = None  # the placeholder of the compute dtype, if that is not the leaf's
    _outside: nn.Parameter | None = None  # the placeholder of the leaf's dtype
    _weight: nn.Parameter | None = None
    _was_trainable: bool = True  # the flag of `_in_forward` as its forward began

    @property
    def name(self) -> str:
        """The parameter's name in the model without wrappers."""
        return clean_name(joined(self.path, self.attribute))

    def take_out(self) -> None:
        """Replaces the parameter by a sentinel."""
        self._enter(State.TAKEN_OUT)
        parameter = self.module._parameters.pop(self.attribute)
        assert parameter is not None
        sentinel = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        self.module.register_buffer(_SENTINEL + self.attribute, sentinel, persistent=False)
        # Readers of the attribute get shape and dtype.
        self._taken_out = TakenOutTensor(self.name, parameter.shape, parameter.dtype, parameter.device)
        self._taken_out.attributes = vars(parameter)
        self.module.__dict__[self.attribute] = self._taken_out

    def sentinel(self) -> torch.Tensor:
        """Returns the buffer that follows the module's casts and moves from `take_out` to `put_back`."""
        found = self.module._buffers[_SENTINEL + self.attribute]
        assert found is not None
        return found

    def show_provisional(self, parameter: nn.Parameter) -> None:
        """Puts a parameter in that can be initialised."""
        self._enter(State.PROVISIONAL)
        self.module.__dict__.pop(self.attribute, None)
        self._hand_on_attributes(parameter)
        self._taken_out = None
        self.provisional = self.module._parameters[self.attribute] = parameter

    def hide_provisional(self) -> None:
        """Takes that parameter out again, so that a cast or move of the module does not see it."""
        if self.state is State.PROVISIONAL and not self.is_replaced():
            self._enter(State.TAKEN_OUT)
            del self.module._parameters[self.attribute]

    def is_replaced(self) -> bool:
        """True if, between the two calls, the user has put another parameter in or removed the provisional one."""
        expected = self.provisional if self.state is State.PROVISIONAL else None
        beside = self.module.__dict__.get(self.attribute)  # a value that is no parameter
        return self.module._parameters.get(self.attribute) is not expected or beside is not self._taken_out

    def put_back(self, placeholder: nn.Parameter, weight: nn.Parameter, in_forward: nn.Parameter | None = None) -> None:
        """Puts the placeholder in. From now on placeholder and weight take turns.

        `in_forward`: replaces the placeholder in the model's forward; None if both would be alike.
        """
        self._enter(State.PLACEHOLDER)
        self._hand_on_attributes(placeholder)
        weight.__dict__ = placeholder.__dict__  # a forward reads and sets the same attributes
        self.provisional = self._taken_out = None
        self.module.__dict__.pop(self.attribute, None)
        self._placeholder, self._weight = placeholder, weight
        self._outside, self._in_forward = placeholder, in_forward
        self.module._buffers.pop(_SENTINEL + self.attribute, None)
        self.module._non_persistent_buffers_set.discard(_SENTINEL + self.attribute)
        self.module._parameters[self.attribute] = placeholder

    def _hand_on_attributes(self, parameter: nn.Parameter) -> None:
        """Gives a parameter the attributes that users have set on what it replaces here."""
        if self.provisional is not None:
            give_attributes(parameter, vars(self.provisional))
        if self._taken_out is not None:
            give_attributes(parameter, self._taken_out.attributes)

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
            if in_functional_call():
                raise ValueError(
                    f"dmuon: torch.func.functional_call gives the model other values of '{self.name}', which Muon "
                    "updates: dmuon computes with its own. Expected: a call of the model itself, or functional_call "
                    "without Muon's matrices, or of a plain model that has loaded the state dict."
                )
            raise ValueError(
                f"dmuon: '{self.name}' was {'deleted' if held is None else 'replaced'} after dmuon.Muon, which would "
                "go on with the weight of before. Expected: write new values inside `with dmuon.full_params(model, "
                "writeback=True)`; take layers out before dedicate_params."
            )
        self.module._parameters[self.attribute] = weight

    def show_placeholder(self) -> None:
        """Puts the placeholder in, unless the user has replaced the weight: `show_weight` will refuse that."""
        if self.state is not State.WEIGHT:
            self._refuse(State.PLACEHOLDER)
        if self.module._parameters.get(self.attribute) is self._weight:
            self.module._parameters[self.attribute] = self._placeholder
        self.state = State.PLACEHOLDER  # last, so that a call that is interrupted can be repeated

    def begin_forward(self) -> None:
        """Replaces the placeholder by the one of the compute dtype, if there is one."""
        assert self._in_forward is not None and self._outside is not None
        if self._in_forward.requires_grad != self._outside.requires_grad:
            self._in_forward.requires_grad_(self._outside.requires_grad)
        self._was_trainable = self._in_forward.requires_grad
        self._replace_placeholder(self._in_forward)

    def end_forward(self) -> None:
        """Undoes `begin_forward`. A placeholder that was frozen in the forward, either of the two, stays so."""
        assert self._in_forward is not None and self._outside is not None
        if self._placeholder is self._in_forward and self._in_forward.requires_grad != self._was_trainable:
            self._outside.requires_grad_(self._in_forward.requires_grad)
        self._replace_placeholder(self._outside)

    def _replace_placeholder(self, other: nn.Parameter) -> None:
        parameters, before = self.module._parameters, self._placeholder
        self._placeholder = other
        if parameters.get(self.attribute) is before:
            parameters[self.attribute] = other

    def show_whole(self, parameter: nn.Parameter) -> None:
        """Puts a parameter with all values in, until `hide_whole`."""
        self._enter(State.WHOLE)
        self.module._parameters[self.attribute] = parameter

    def hide_whole(self) -> None:
        """Puts the placeholder back, if `show_whole` has replaced it. A call that is interrupted can be repeated."""
        if self.state is State.WHOLE:
            self.module._parameters[self.attribute] = self._placeholder
            self._enter(State.PLACEHOLDER)

    def _enter(self, state: State) -> None:
        if (self.state, state) not in _LEGAL:
            self._refuse(state)
        self.state = state

    def _refuse(self, state: State) -> NoReturn:
        raise RuntimeError(f"dmuon bug: '{self.name}': expected no change from {self.state} to {state}")


def joined(path: str, attribute: str) -> str:
    """Returns the name of an attribute of the module at a path. The model itself is at ""."""
    return f"{path}.{attribute}" if path else attribute


def clean_name(path: str) -> str:
    """Returns a module's or parameter's name without the wrappers of checkpoints, FSDP1 and torch.compile."""
    return clean_tensor_name(f"{path}.").replace("_orig_mod.", "").removesuffix(".")


def held_inside(model: nn.Module, held: Mapping[nn.Module, Sequence[T]]) -> Iterator[tuple[nn.Module, list[T]]]:
    """Yields each module of the model with all that `held` has of itself and of modules below, if that is anything."""
    for module in model.modules():
        if inside := [entry for part in module.modules() for entry in held.get(part, ())]:
            yield module, inside


def holds_sentinel(module: nn.Module) -> bool:
    """True if a leaf of the module itself is taken out."""
    return any(name.startswith(_SENTINEL) for name in module._buffers)


def restore_order(module: nn.Module, names: Iterable[str]) -> None:
    """Restores the order of the module's parameters, `names`, which taking out and putting back has changed."""
    for name in names:
        if name in module._parameters:  # the user may have removed it
            module._parameters[name] = module._parameters.pop(name)
