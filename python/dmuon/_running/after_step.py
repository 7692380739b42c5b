"""Factors of rows, which follow from maxima over all ranks, behind the optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch


class AfterStep(Protocol):
    """Multiplies rows behind the update, by factors that follow from the largest of the ranks' numbers.

    The maxima travel in the step's agreement. `_attention.StepClip` is the only one.
    """

    def problem(self) -> str | None:
        """Returns what is wrong with this rank's maxima, and forgets it. Then all ranks raise."""

    def forget(self) -> None:
        """Begins the step's maxima anew: a load or a write has replaced the weights that have shown them."""

    def clear(self) -> None:
        """Forgets the maxima of forwards whose backward has run: their gradients are cleared."""

    def skip_unless(self, finite: torch.Tensor) -> None:
        """Forgets the maxima if a [] bool, equal on all ranks, is false: the gradients are used for no step."""

    def settings(self) -> list[str]:
        """Returns what must be equal on all ranks."""

    def maxima(self) -> torch.Tensor:
        """Returns this rank's numbers, [n] fp64 on the engine's device."""

    def row_factors(
        self, maxima: torch.Tensor, applies: torch.Tensor, group_of: Sequence[int]
    ) -> Mapping[int, torch.Tensor]:
        """Returns the factors of rows of the parameters that this rank owns, and begins the next step's maxima.

        Args:
            maxima: [n] fp64, the largest over all ranks.
            applies: [] bool; if it is false, all factors are 1.
            group_of: by parameter; negative if the step does not update it.
        """

    def scale_others(self) -> None:
        """Multiplies what AdamW updates, behind its step, by the factors that `row_factors` has found."""
