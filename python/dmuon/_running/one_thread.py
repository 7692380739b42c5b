"""One thread at a time may use a model."""

from __future__ import annotations

import threading

from dmuon import _C


class OneThread:
    """Knows the thread that is in a pass or a step of a model, and refuses calls by others.

    A backward that has raised holds the model until the thread's next call, or its end.
    """

    def __init__(self) -> None:
        self._holder: int | None = None

    def is_held_by_another(self) -> bool:
        """True if another thread holds the model."""
        holder = self._holder
        if holder is None or holder == threading.get_ident():
            return False
        return any(thread.ident == holder for thread in threading.enumerate())

    def refuse_others(self, what: str) -> None:
        """Raises ValueError if another thread holds the model, or inside of a rule. Ends what this one held."""
        _C.refuse_in_update()
        if self.is_held_by_another():
            raise ValueError(
                f"dmuon: {what} in thread '{threading.current_thread().name}' while another thread is in a pass or a "
                "step of the model. Expected: one thread at a time uses a model."
            )
        self._holder = None

    def begin(self, what: str) -> None:
        """Holds the model. Raises ValueError if another thread does."""
        self.refuse_others(what)
        self._holder = threading.get_ident()

    def begin_backward(self) -> None:
        """Holds the model. Autograd may run hooks of one backward in several threads."""
        self._holder = self._holder or threading.get_ident()

    def end(self) -> None:
        """Ends what this thread holds."""
        if self._holder == threading.get_ident():
            self._holder = None
