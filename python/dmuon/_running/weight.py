"""A leaf's weight while its unit computes, which knows if a module changes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

_DATA: Any = torch.Tensor.data  # torch's own descriptor, which typing takes for a tensor


class Weight(nn.Parameter):
    """A parameter over a view of a unit's packed buffer, in a module while that computes.

    A change in place counts up the tensor's version. `.data` has a version of its own, so a copy of the values is kept
    when it is read. Assigning `.data` writes the values, because the packed buffer stays.

    Under tensor parallelism modules see a DTensor over it, whose `.data` nobody sees being read.
    """

    _versions_before: tuple[int, ...]
    _copy: torch.Tensor | None
    _dtensor: Any = None

    @staticmethod
    def over(view: torch.Tensor) -> Weight:
        """Returns a parameter over the view."""
        weight: Weight = Weight(view)
        weight.begin_use()
        return weight

    def seen_as(self, dtensor: torch.Tensor) -> None:
        """Counts changes of a DTensor over this tensor too: its functions change memory below autograd."""
        self._dtensor = dtensor
        self.begin_use()

    def _versions(self) -> tuple[int, ...]:
        seen = self._dtensor
        return (self._version,) if seen is None else (self._version, seen._version, seen._local_tensor._version)

    def begin_use(self) -> None:
        """From now on changes count."""
        self._versions_before, self._copy = self._versions(), None

    def end_use(self) -> None:
        """Drops the copy."""
        self._copy = None

    def is_changed(self) -> bool:
        """Returns True if the values have changed since `begin_use`. After `.data` was read it waits for the device."""
        if self._versions() != self._versions_before:
            return True
        return self._copy is not None and not torch.equal(self._copy, _DATA.__get__(self))

    @property
    def data(self) -> torch.Tensor:
        """The values, without history and with a version of their own."""
        plain: torch.Tensor = _DATA.__get__(self)
        if self._copy is None:
            self._copy = plain.clone()
        return plain

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise ValueError(
                f"dmuon: assigning .data of a weight: expected shape {tuple(self.shape)}, got {tuple(value.shape)}"
            )
        self.detach().copy_(value)
