"""Puts a unit's weights into its modules while they compute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from torch.autograd import Variable

from dmuon import _C
from dmuon._running.weight import Weight
from dmuon._setup.place import Place, State


class UnitWeights:
    """Shows a unit's modules their weights while they compute.

    In a forward this is the time between the hooks of a call. In a backward it lasts from the first hook of the unit's
    own module to the gradient of its inputs, or to the end. A checkpoint inside that module, or around it, recomputes
    without our hooks.
    """

    def __init__(self, places: list[Place], weights: Sequence[Weight], take_back: Callable[[], None]) -> None:
        """`take_back` is called when weights have changed, while they are there."""
        self.places = places
        self._weights = weights
        self._take_back = take_back
        self._num_calls = 0  # that are open
        self._error_before = 0  # which the caller handles
        self.is_in_backward = False  # until the end of the module's own, or of the whole

    def begin_call(self, reader: bool) -> None:
        """Puts the weights in. `reader`: the call is of one of several modules that read them."""
        if not self._num_calls and not self.is_in_backward:
            self.begin_use()
            self._error_before = _handled_error()
        self._num_calls += 1
        for place in self.places:
            place.show_weight()
        if not reader:
            self._keep_in_backward()

    def end_call_in_backward(self, reader: bool) -> None:
        """Ends a use in a backward, before the weights may be freed. Whoever reads them later meets placeholders."""
        self.take_back_changes()
        if not reader and not self._num_calls:
            self.show_placeholders()

    def end_backward(self) -> None:
        """Ends a use in a backward that no input of the unit ends."""
        if self.is_in_backward:
            self.take_back_changes()

    def show_weights(self) -> None:
        """Puts the weights in, in a backward until its end."""
        if not self._num_calls and not self.is_in_backward:
            self.begin_use()
        for place in self.places:
            place.show_weight()
        self._keep_in_backward()

    def _keep_in_backward(self) -> None:
        if _C.in_backward() and not self.is_in_backward:
            self.is_in_backward = True
            Variable._execution_engine.queue_callback(self.show_placeholders)

    def begin_use(self) -> None:
        """From now on changes count."""
        for weight in self._weights:
            weight.begin_use()

    def take_back_changes(self) -> None:
        """Takes back what was changed since the use began, or since the last call of this. The weights are there."""
        if any(weight.is_changed() for weight in self._weights):
            self.take_back_all()
        else:
            self.begin_use()

    def take_back_all(self) -> None:
        """Takes back all values: some have changed."""
        self.begin_use()
        self._take_back()

    def end_call(self) -> None:
        """Puts the placeholders back, unless another call or a backward still reads the weights."""
        # A recomputation that has all that it needs stops by raising.
        if self._num_calls == 1 and (_C.in_backward() or _handled_error() == self._error_before):
            self.take_back_changes()
        self._num_calls = max(self._num_calls - 1, 0)  # a call that raised may end without a beginning
        if not self.is_in_backward and not self._num_calls:
            self.show_placeholders()
            for weight in self._weights:
                weight.end_use()

    def show_placeholders(self) -> None:
        """Replaces weights by placeholders."""
        self.is_in_backward = False
        self._num_calls = 0
        for place in self.places:
            if place.state is State.WEIGHT:
                place.show_placeholder()


def _handled_error() -> int:
    """Returns the identity of the error that is being handled: a hook of a call that raises handles another one."""
    return id(sys.exc_info()[1])
