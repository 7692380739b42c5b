"""Calls for graphs and for C++, which hide what they hold from Python's garbage collector."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class WeakCall:
    """A call of `function(holder, *arguments, ...)` that does not keep the holder. When it is gone, it does nothing."""

    def __init__(self, function: Callable[..., Any], holder: Any, *arguments: Any) -> None:
        self._function, self._holder, self._arguments = function, weakref.ref(holder), arguments

    # Autograd runs hooks inside of a compiled step, too.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *more: Any) -> None:
        if (holder := self._holder()) is not None:
            self._function(holder, *self._arguments, *more)
