"""dmuon's CUDA kernels on this device: by the fake driver of tests/kernels/cuda, on the host."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from . import _extension

_native = _extension.load()
_DRIVER = _extension.folder().parent / "kernels/cuda/driver/libcuda.so.1"
_loaded: list[ctypes.CDLL] = []


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulong) for name in ("launches", "blocks", "bytes_read", "bytes_written")]


def has_cuda_kernels() -> bool:
    """False if the fake driver is not built, because there is no nvcc."""
    return _DRIVER.exists()


def use_cuda_kernels(capability: int = 90) -> None:
    """Makes dmuon take this device for a CUDA device; before dmuon first asks for its kernels.

    Args:
        capability: the compute capability, such as 90 for 9.0; a process has one.
    """
    os.environ.update(DMUON_TEST_KERNELS="1", FAKE_CUDA_DEVICE=str(capability))
    # dmuon's dlopen of the name finds the library that is loaded.
    _loaded.append(ctypes.CDLL(str(_DRIVER)))
    _native.run_cuda_kernels()


def cuda_counts() -> dict[str, int]:
    """Launches, blocks and bytes of the kernels that have run since the last call. Wait for the device before."""
    count = _loaded[0].fake_cuda_counts
    count.restype = _Counts
    counts = count()
    return {name: getattr(counts, name) for name, _ in _Counts._fields_}


@contextlib.contextmanager
def misplaced_cuda_kernels() -> Iterator[None]:
    """A planted bug: kernels run on a stream that nothing else waits for."""
    _native.misplace_cuda_kernels(True)
    try:
        yield
    finally:
        _native.misplace_cuda_kernels(False)
