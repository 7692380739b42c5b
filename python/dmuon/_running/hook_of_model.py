"""Hooks of modules that may be copied or pickled without their model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class HookOfModel:
    """A hook that calls `method`, which the model needs. A copy of its module has a hook that does nothing."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = method

    def __call__(self, *args: Any) -> None:
        if self._method is not None:
            self._method(*args)

    def __reduce__(self) -> Any:
        """Leaves out the method, which would take the model along."""
        return HookOfModel, ()
