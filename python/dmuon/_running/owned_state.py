"""A leaf's state as `opt.state` has it."""

from __future__ import annotations

import weakref
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import torch

from dmuon import _C


class OwnedState(dict[str, torch.Tensor]):
    """Names and tensors. A read waits for an update that is under way; tensors that were read earlier do not."""

    def __init__(self, tensors: dict[str, torch.Tensor], engine: _C.Engine) -> None:
        """Does not keep the engine alive."""
        super().__init__(tensors)
        self._names = tensors.keys() | ()
        self._engine = weakref.ref(engine)

    def is_whole(self) -> bool:
        """False if the user has removed a tensor."""
        return self.keys() == self._names

    def _finish_update(self) -> None:
        if (engine := self._engine()) is not None:
            engine.finish_update()

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns a tensor."""
        self._finish_update()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a tensor, or `default`."""
        self._finish_update()
        return super().get(name, default)

    def items(self) -> ItemsView[str, torch.Tensor]:  # type: ignore[override]
        """Returns names and tensors."""
        self._finish_update()
        return super().items()

    def values(self) -> ValuesView[torch.Tensor]:  # type: ignore[override]
        """Returns the tensors."""
        self._finish_update()
        return super().values()

    def pop(self, name: str, *default: Any) -> Any:
        """Removes a tensor, and returns it."""
        self._finish_update()
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, torch.Tensor]:
        """Removes a name and its tensor, and returns them."""
        self._finish_update()
        return super().popitem()

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Returns a tensor, or adds `default`."""
        self._finish_update()
        return super().setdefault(name, default)

    def copy(self) -> dict[str, torch.Tensor]:
        """Returns a plain dict with the tensors."""
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __iter__(self) -> Iterator[str]:
        """Returns the names. dict(state), {**state} and d.update(state) read by `__getitem__`, because this exists."""
        return super().__iter__()

    def __repr__(self) -> str:
        self._finish_update()
        return super().__repr__()

    def __reduce__(self) -> Any:
        """Copies and pickles as a plain dict."""
        return dict, (self.copy(),)


def removed_states(states: Mapping[Any, Any], leaf_of: Mapping[Any, int]) -> list[Any]:
    """Returns the matrices whose state the user has removed from `opt.state`, all of it or some tensors."""
    found = ((parameter, states.get(parameter)) for parameter in leaf_of)
    return [parameter for parameter, state in found if not isinstance(state, OwnedState) or not state.is_whole()]
