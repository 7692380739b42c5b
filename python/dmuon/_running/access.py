"""The state of a model's weights, which refuses calls at a wrong time."""

from __future__ import annotations

import os

from dmuon import _C


class Access:
    """Knows if a model's weights are sharded, whole, replaced by a mean, or on the host."""

    def __init__(self, engine: _C.Engine) -> None:
        """Begins with the weights at their owners."""
        self._engine = engine
        self._process = os.getpid()
        self.whole = self.writes_back = False  # inside full_params; at its end
        self.was_loaded = False  # inside full_params, all that trains
        self.torn: set[str] = set()  # of "model", "optimizer": a step or a load was interrupted, so it must be loaded
        self.is_averaged = self.offloaded = False  # inside Ema.applied; after offload

    def set_averaged(self, is_averaged: bool) -> None:
        """Notes that the weights are a mean from now on, or are the weights again."""
        self.is_averaged = True  # until the engine knows: an interrupt may come in between
        self._engine.refuse_backward(_inside_applied("a backward") if is_averaged else "")
        self.is_averaged = is_averaged

    def set_offloaded(self, is_offloaded: bool) -> None:
        """Notes that the optimizer's memory is on the host from now on, or is on the device again."""
        self.offloaded = is_offloaded
        self._engine.refuse_backward(_after_offload("a backward") if is_offloaded else "")

    def refuse(self, what: str, *, whole: bool = False, averaged: bool = False) -> None:
        """Raises ValueError after offload, while every weight is `whole`, or while the weights are a mean."""
        self.refuse_offloaded(what)
        if whole and self.whole:
            raise ValueError(f"dmuon.full_params: {what} inside it. Expected: leave the context first.")
        if averaged and self.is_averaged:
            raise ValueError(_inside_applied(what))

    def refuse_offloaded(self, what: str) -> None:
        """Raises ValueError after offload, and as `refuse_forked`."""
        self.refuse_forked(what)
        if self.offloaded:
            raise ValueError(_after_offload(what))

    def refuse_forked(self, what: str) -> None:
        """Raises RuntimeError in a forked child, which would wait for ever."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"dmuon: {what} in a process that was forked from the one of this model, and lacks its threads. "
                "Expected: a process that is spawned (start_method='spawn'), or a model that the child makes."
            )

    def refuse_lost_load(self, of_matrices: bool = True) -> None:
        """Raises ValueError if values from a `load_state_dict` would be lost. `offload` leaves all but matrices."""
        if of_matrices:
            self.refuse_offloaded("load_state_dict()")
        if self.is_averaged:
            raise ValueError(_inside_applied("load_state_dict()"))
        if self.whole and not self.writes_back:
            raise ValueError(
                "dmuon.full_params: load_state_dict() inside it without writeback would be lost. Expected: `with "
                "dmuon.full_params(model, writeback=True)`."
            )


def _inside_applied(what: str) -> str:
    return f"dmuon.Ema.applied: {what} inside it. Expected: leave the context first."


def _after_offload(what: str) -> str:
    return f"dmuon.offload: {what} after it. Expected: dmuon.load(model) first."
