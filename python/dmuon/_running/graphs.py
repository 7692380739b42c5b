"""CUDA graphs of the optimizer's batches: an option of the environment, until GPUs have shown what they are worth."""

from __future__ import annotations

import os

from dmuon import _C

VARIABLE = "DMUON_CUDA_GRAPHS"
_MOST_BYTES = 64 << 20  # of scratch memory, kept for graphs; larger batches keep a GPU busy


def wants_graphs() -> bool:
    """Returns True if DMUON_CUDA_GRAPHS is 1, and False if it is 0 or not set.

    Raises:
        ValueError: it is something else.
    """
    value = os.environ.get(VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"Muon: {VARIABLE}: expected 0 or 1 in the environment, got {value!r}")
    return value == "1"


def batch_graphs() -> _C.BatchGraphs | None:
    """Returns an optimizer's graphs, None if nobody wants any."""
    return _C.BatchGraphs(_MOST_BYTES) if wants_graphs() else None
