"""Messages that Python sends beside the engine's, for which the host waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dmuon import _C


@contextmanager
def blocking_message(engine: _C.Engine, what: str) -> Iterator[None]:
    """Tells the watch what this rank waits for. `what` is the message, as the subject of a sentence.

    Raises:
        RuntimeError: the message failed; names it.
    """
    engine.leave(what)
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"dmuon: {what} failed: a rank died, or did not come. Reported: {error}") from error
