"""Calls for graphs and for C++, which hide what they hold from Python's garbage collector."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch


class WeakCall:
    """A call of `function(holder, *arguments, ...)` that does not keep the holder.

    When it is gone, the call does nothing, or raises ValueError with the words `gone`: where other ranks, whose garbage
    collector has not come by yet, would wait for a message.
    """

    def __init__(self, function: Callable[..., Any], holder: Any, *arguments: Any, gone: str = "") -> None:
        self._function, self._holder, self._arguments, self._gone = function, weakref.ref(holder), arguments, gone

    # Autograd runs hooks inside of a compiled step, too.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *more: Any) -> None:
        if (holder := self._holder()) is not None:
            self._function(holder, *self._arguments, *more)
        elif self._gone:
            raise ValueError(self._gone)
