"""Puts a unit's weights into its modules while they compute."""

from __future__ import annotations

from torch.autograd import Variable

from dmuon import _C
from dmuon._setup.place import Place, State


class UnitWeights:
    """Shows a unit's modules their weights while they compute.

    In a forward this is the time between the unit's hooks. In a backward it lasts from the unit's first hook to the
    end. A checkpoint inside the unit's module, or around it, recomputes without our hooks.
    """

    def __init__(self, places: list[Place]) -> None:
        self._places = places
        self._until_end_of_backward = False

    def show_weights(self) -> None:
        """Puts the weights in, in a backward until its end."""
        for place in self._places:
            place.show_weight()
        if _C.in_backward() and not self._until_end_of_backward:
            self._until_end_of_backward = True
            Variable._execution_engine.queue_callback(self.show_placeholders)

    def after_forward(self) -> None:
        """Puts the placeholders back, unless a backward still recomputes."""
        if not self._until_end_of_backward:
            self.show_placeholders()

    def show_placeholders(self) -> None:
        """Replaces weights by placeholders."""
        self._until_end_of_backward = False
        for place in self._places:
            if place.state is State.WEIGHT:
                place.show_placeholder()
