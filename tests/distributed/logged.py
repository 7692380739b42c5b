"""What dmuon logs, in a rank's process, where pytest sees no log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged() -> Iterator[list[str]]:
    """Gives the messages that come inside, as they come."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dmuon").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("dmuon").removeHandler(handler)
