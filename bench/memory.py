"""Peak memory of one contender while others live in the same process.

On CUDA: bytes of torch's allocator. On Linux CPUs: resident pages, which include weights, gradients,
state, activations, the transport's buffers and what malloc keeps; good to about a tenth. Both are the
peak since `settle`, above the level when the meter was made, which is before the contender was built.
"""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import torch

_RESET = Path("/proc/self/clear_refs")


def _status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


class MemoryMeter:
    """Make one, build, warm up, `settle`, run the steps in question, read `peak_bytes`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._works = self._cuda or _RESET.exists()
        self._base = 0
        self._trim()
        if self._works:
            self._base = torch.cuda.memory_allocated() if self._cuda else _status_bytes("VmRSS")

    def settle(self) -> None:
        """Forgets peaks so far: building holds the whole model for a moment, training does not."""
        self._trim()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        elif self._works:
            try:
                _RESET.write_text("5")  # VmHWM, the peak of VmRSS, starts afresh
            except OSError:  # some containers forbid it
                self._works = False

    def peak_bytes(self) -> int | None:
        """None where the system gives no way to measure it."""
        if not self._works:
            return None
        peak = torch.cuda.max_memory_allocated() if self._cuda else _status_bytes("VmHWM")
        return max(peak - self._base, 0)

    def _trim(self) -> None:
        gc.collect()
        if self._works and not self._cuda:
            # Free pages that malloc keeps from earlier contenders would serve this one unseen.
            ctypes.CDLL(None).malloc_trim(0)
