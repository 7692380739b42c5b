"""A leaf's state as `opt.state` has it."""

from __future__ import annotations

import weakref
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any

import torch

from dmuon import _C


class OwnedState(dict[str, torch.Tensor]):
    """Names and tensors. A read waits for an update that is under way; tensors that were read earlier do not."""

    def __init__(self, tensors: dict[str, torch.Tensor], engine: _C.Engine) -> None:
        """Does not keep the engine alive."""
        super().__init__(tensors)
        self.names = frozenset(tensors)  # of dmuon's; the user may add others
        self._engine = weakref.ref(engine)

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


def removed_states(states: Mapping[Any, Any], parameters: Iterable[Any]) -> dict[Any, frozenset[str]]:
    """Returns the names of the tensors that the user has removed from `opt.state`, by parameter; none for all.

    Args:
        states: `opt.state`.
        parameters: placeholders of matrices.

    Raises:
        ValueError: an entry was replaced. Names the parameter.
    """
    found = {}
    for parameter in parameters:
        state = states.get(parameter)
        if isinstance(state, OwnedState):
            if missing := state.names - state.keys():
                found[parameter] = missing
        elif state:
            raise ValueError(
                f"dmuon: the state of '{parameter._name}' was replaced, which its owner does not see. Expected: "
                "optimizer.load_state_dict(...), or `del optimizer.state[parameter]`, which lets it begin anew."
            )
        else:
            found[parameter] = frozenset()
    return found
