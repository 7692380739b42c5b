"""A method of one module in place of its class's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.nn as nn


class ReplacedMethod:
    """Makes `module.name(...)` call `method(module, ...)`, until `remove`."""

    def __init__(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        # Weakly: a module that the user removes from a model is freed at once.
        self._module, self._name, self._method = weakref.ref(module), name, method
        module.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self._module(), *args, **kwargs)

    def remove(self) -> None:
        """Restores the class's method."""
        if (module := self._module()) is not None:
            module.__dict__.pop(self._name, None)
