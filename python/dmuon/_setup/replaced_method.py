"""A method of one module in place of the one that it has."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.nn as nn


class ReplacedMethod:
    """Makes `module.name(...)` call `method(inner, module, ...)`, until `remove`.

    `inner` is the bound method that it has called before: the module's own, which a user or another tool has set, or
    its class's.
    """

    def __init__(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        # Weakly: a module that the user removes from a model is freed at once.
        self._module, self._name = weakref.ref(module), name
        self._method: Callable[..., Any] | None = method
        self._own = module.__dict__.get(name)
        module.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        of_class = functools.partial(getattr(type(module), self._name), module)
        inner = of_class if self._own is None else self._own
        return inner(*args, **kwargs) if self._method is None else self._method(inner, module, *args, **kwargs)

    def remove(self) -> None:
        """Restores what the module had. If it has been replaced again, it is called from there."""
        self._method = None
        module = self._module()
        if module is None or module.__dict__.get(self._name) is not self:
            return
        own = self._own
        while isinstance(own, ReplacedMethod) and own._method is None:  # removed meanwhile
            own = own._own
        if own is None:
            del module.__dict__[self._name]
        else:
            module.__dict__[self._name] = own
