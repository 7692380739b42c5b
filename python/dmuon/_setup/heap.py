"""Memory that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes


def give_back_heap() -> None:
    """Returns the freed pages of malloc's heaps to the system, if the C library is glibc.

    Takes some milliseconds for each 100 MB, and again as long when the process touches new pages.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
