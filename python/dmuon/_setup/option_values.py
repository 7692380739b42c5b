"""Checks of single options. Imports no torch."""

from __future__ import annotations

import os

from dmuon import _plan

_TYPES = {bool: "True or False", int: "an int within its range", float: "a number"}


def require(function: str, good: bool, argument: str, expected: str, got: object) -> None:
    """Raises a ValueError that names function and argument, unless `good`."""
    if not good:
        raise ValueError(f"{function}: {argument}: expected {expected}, got {got!r}")


def real_number(value: object) -> float | None:
    """Returns a real number, or a tensor or array of one, as a float; for anything else, such as a bool, None."""
    if type(value) is float:
        return value
    try:
        number = value.item() if hasattr(value, "item") else value
        return float(number) if isinstance(number, int | float) and not isinstance(number, bool) else None
    except (ValueError, OverflowError, RuntimeError):  # several elements, an int beyond fp64, a tensor without values
        return None


def set_option(function: str, options: _plan.StepOptions, name: str, value: object, or_none: bool = False) -> None:
    """Sets an option, whose range C++ checks. Refuses a value that C++ would convert, or cannot hold.

    With `or_none` the value None keeps the default, 0, which users cannot give.
    """
    if or_none and value is None:
        return
    kind = type(getattr(options, name))
    try:
        if isinstance(value, bool) != (kind is bool) or (or_none and value == 0):
            raise TypeError
        setattr(options, name, value)
    except TypeError:
        require(function, False, name, _TYPES[kind] + ", not 0, or None" * or_none, value)


def set_replicated(function: str, options: _plan.StepOptions, replicated: object) -> None:
    """Sets `replicated`, after the step's other options: such weights are not resharded, and need no node copies."""
    set_option(function, options, "replicated", replicated)
    if options.replicated:
        options.node_copy = options.reshard_after_forward = False


def require_late_updates(function: str, late_updates: object) -> None:
    """Raises a ValueError unless it is None, True or False."""
    good = late_updates is None or isinstance(late_updates, bool)
    require(function, good, "late_updates", "True, False or None", late_updates)


def require_path(value: object, argument: str) -> None:
    """Raises a ValueError that names `argument`, unless the value may be a path."""
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{argument}: expected a path, got {value!r}")
