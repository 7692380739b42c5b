"""Interrupts a call of dmuon at one of its places, as Ctrl-C may."""

from __future__ import annotations

import dis
import sys
from collections import Counter
from collections.abc import Callable
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType
from typing import Any

import dmuon

_NOTHING = dis.opmap["NOP"]
_SOURCES = str(Path(dmuon.__file__).parent)


def interrupt(call: Callable[[], Any], number: int) -> bool:
    """Interrupts `call` at the place with this number: a line or a return, which counts the first two times.

    Returns False if there are not so many places. Then the call has ended.
    """
    places: Counter[tuple[Any, ...]] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_SOURCES):
            return None
        code = frame.f_code
        # A signal comes neither at `try:`, which does nothing, nor between a generator's yield and its caller.
        can_come = code.co_code[frame.f_lasti] != _NOTHING if event == "line" else not code.co_flags & CO_GENERATOR
        place = (code, frame.f_lineno, event)
        if event in ("line", "return") and can_come and places[place] < 2:
            places[place] += 1
            if places.total() > number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
