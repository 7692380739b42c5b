"""Messages that Python sends beside the engine's, for which the host waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from dmuon import _C

_GRACE_S = 3.0  # in which the watch of this rank finds what another rank's has found


@contextmanager
def blocking_message(engine: _C.Engine, what: str) -> Iterator[None]:
    """Tells the watch what this rank waits for. `what` is the message, as the subject of a sentence.

    Raises:
        RuntimeError: the message failed; names it, and the watch's report if there is one.
    """
    engine.leave(what)
    try:
        yield
    except RuntimeError as error:
        mesh, end = engine.mesh, time.monotonic() + _GRACE_S
        while not (report := mesh.failure()) and time.monotonic() < end:
            time.sleep(0.05)
        mesh.raised()
        reported = f"{report} ({error})" if report else error
        raise RuntimeError(f"dmuon: {what} failed: a rank died, or did not come. Reported: {reported}") from error
