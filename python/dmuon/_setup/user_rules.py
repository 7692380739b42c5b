"""The rules of update that the user has registered (dmuon.rules), by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch

from dmuon import _C, _plan

Function = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, float]], torch.Tensor]
Side = int | Literal["rows", "cols"]
States = dict[str, tuple[Side, Side]]  # rows and columns by name, of an [out, in] matrix


class _Rule(NamedTuple):
    function: Function
    moves_weights: bool
    states: States
    native: _C.UserFunction


_registered: dict[str, _Rule] = {}


def add(name: str, function: Function, moves_weights: bool, states: States) -> str | None:
    """Adds a rule. If the name has another one, returns its description, and changes nothing.

    A function of the same qualified name is the same rule, defined again, as in a notebook.
    """
    sides = [(state, _number(rows), _number(cols)) for state, (rows, cols) in states.items()]
    call = functools.partial(_call, function, tuple(states))
    made = _Rule(function, moves_weights, states, _C.UserFunction(name, sides, moves_weights, call))
    former = _registered.setdefault(name, made)
    # Lambdas, and objects of one class, have one name whatever they do.
    is_named = hasattr(function, "__qualname__") or isinstance(function, functools.partial)
    is_same = former.function is function or (is_named and "<lambda>" not in _described(made))
    if not is_same or _described(former) != _described(made):
        return _described(former)
    _registered[name] = made
    return None


def _number(side: Side) -> int | None:
    return None if isinstance(side, str) else side


def _call(
    function: Function,
    names: tuple[str, ...],
    update: torch.Tensor,
    weights: torch.Tensor,
    states: list[torch.Tensor],
    options: dict[str, float],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Calls a rule's function. Returns its answer, and the new states in order."""
    state = dict(zip(names, states, strict=True))
    answer: Any = function(update, weights, state, options)
    if not isinstance(answer, torch.Tensor):
        raise TypeError(f"expected a tensor from the function, got {type(answer).__name__}")
    if state.keys() != set(names) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        got = {name: type(value).__name__ for name, value in state.items()}
        raise TypeError(f"state: expected a tensor for each of {list(names)}, got {got}")
    return answer, [state[name] for name in names]


def all_names() -> list[str]:
    """Returns the names of all rules, dmuon's own first."""
    return [*_plan.rule_names(), *_registered]


def is_users(name: str) -> bool:
    """True if a user has registered the rule."""
    return name in _registered


def native(name: str) -> str | _C.UserFunction:
    """Returns a rule as the engine has it: dmuon's own by name."""
    return _registered[name].native if name in _registered else name


def in_plans(name: str) -> str:
    """Returns a rule as plans have it: a user's with the sizes of its states."""
    if name not in _registered:
        return name
    return f"{name}[{', '.join(f'{rows} x {cols}' for rows, cols in _registered[name].states.values())}]"


def fact(name: str) -> str:
    """Returns the line about a rule that must be equal on all ranks."""
    if name not in _registered:
        return f"rule {name}"
    return f"rule {name}, which {_described(_registered[name])}"


def _described(rule: _Rule) -> str:
    how = "moves weights" if rule.moves_weights else "changes updates"
    return f"{how} by {_name_of(rule.function)}, with states {rule.states}"


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        args = [_of_argument(value) for value in function.args]
        keywords = {name: _of_argument(value) for name, value in function.keywords.items()}
        return f"{_name_of(function.func)} with {args}, {keywords}"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _of_argument(value: Any) -> str:
    # Other words would have an address in them, which no other rank has.
    has_words = not callable(value) and getattr(type(value), "__repr__", None) is not object.__repr__
    return repr(value) if has_words else _name_of(value)


def change_of(
    name: str, update: torch.Tensor, weights: torch.Tensor, states: list[torch.Tensor], options: dict[str, float]
) -> tuple[torch.Tensor, bool]:
    """Returns a user's rule's answer for one matrix, and True if this is the new weights."""
    rule = _registered[name]
    answer, _ = _call(rule.function, tuple(rule.states), update, weights, states, options)
    return answer, rule.moves_weights
