"""When a unit's modules hold their weights."""

from __future__ import annotations

from torch.autograd import Variable

from dmuon import _C
from dmuon._setup.place import Place, State


class UnitWeights:
    """Shows a unit's modules their weights while they compute.

    In a forward that is the time between the unit's hooks. In a backward it lasts from the first sign of the unit to
    the end: a checkpoint inside the unit's module, or one that is the unit's module, recomputes without passing
    our hooks.
    """

    def __init__(self, places: list[Place]) -> None:
        self._places = places
        self._until_end_of_backward = False

    def show_weights(self) -> None:
        """Puts the weights in; in a backward until its end."""
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
        """Puts the placeholders back where weights are."""
        self._until_end_of_backward = False
        for place in self._places:
            if place.state is State.WEIGHT:
                place.show_placeholder()
