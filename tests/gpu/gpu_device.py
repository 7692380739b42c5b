"""The device that the parts run on: a GPU, or the asynchronous device of the tests with everything scaled down."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("async_device", "newton_schulz", "distributed")] + [
    str(TESTS.parent)
]


class NotHere(Exception):
    """This device cannot run the part; the words say why."""


@dataclasses.dataclass(frozen=True)
class Device:
    """The differences between a GPU and the emulated one."""

    kind: str  # "cuda" or "emulated"

    @property
    def is_real(self) -> bool:
        return self.kind == "cuda"

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_real else "asynchronous device, no hardware"

    @property
    def backends(self) -> str:
        """Of process groups."""
        return "cpu:gloo,cuda:nccl" if self.is_real else "cpu:gloo,emulated:emulated"

    def use(self, rank: int) -> torch.device:
        """The device of a rank: of several on one GPU all have that."""
        torch.get_device_module(self.kind).set_device(0 if self.is_real else rank)
        return torch.device(self.kind, 0 if self.is_real else rank)

    def synchronize(self) -> None:
        torch.get_device_module(self.kind).synchronize()

    def seconds(self, call: Callable[[], Any], repeats: int = 7) -> float:
        """Median time of a call on a GPU; a first one is not counted."""
        call()
        found = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            self.synchronize()
            found.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(found)

    def kernels(self, call: Callable[[], Any]) -> int:
        """Returns the number of kernels that a call launches."""
        self.synchronize()
        if not self.is_real:
            import async_device

            async_device.reset_statistics()
            with async_device.phase("counted"):
                call()
            self.synchronize()
            return int(async_device.statistics()["counted"]["kernels"])
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            self.synchronize()
        return sum(1 for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)

    @contextmanager
    def no_host_sync(self) -> Iterator[None]:
        """Makes a call raise if it would block the host."""
        if not self.is_real:
            import async_device

            with async_device.no_host_sync():
                yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def open_device() -> Device:
    """A GPU where there is one.

    Raises:
        NotHere: there is none, and the emulated one is not built (`tools/build all`).
    """
    if torch.cuda.is_available():
        return Device("cuda")
    try:
        import async_device  # noqa: F401  # which registers it
    except ImportError as error:
        raise NotHere(f"no GPU, and no emulated device (tools/build all builds it): {error}") from error
    return Device("emulated")
