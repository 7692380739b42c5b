"""The device that the parts run on: a GPU, or the asynchronous device of the tests with everything scaled down."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("async_device", "newton_schulz", "distributed")] + [
    str(TESTS.parent)
]

CYCLES = 2e9  # a second, at most, of a GPU's clock


class NotHere(Exception):
    """This device cannot run the part; the words say why."""


class Time(NamedTuple):
    """Seconds of a call: of the device, and until the host has issued it."""

    device: float
    host: float


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

    def times(self, calls: Mapping[str, Callable[[int], Any]], rounds: int = 5) -> dict[str, Time]:
        """Median times on a GPU of contenders, which take turns. Calls get 0, 1, ..., for data of their own.

        The device waits until the host has issued a block of calls, so a busy host makes no kernel look slow.
        """
        blocks = {name: self._first(call) for name, call in calls.items()}
        found: dict[str, list[Time]] = {name: [] for name in calls}
        names = list(calls)
        for turn in range(rounds):
            for at in range(len(names)):
                name = names[(at + turn) % len(names)]
                found[name].append(self._block(calls[name], *blocks[name]))
        return {name: Time(*map(statistics.median, zip(*some, strict=True))) for name, some in found.items()}

    def _first(self, call: Callable[[int], Any]) -> tuple[int, float]:
        """The calls of a block of 2 ms or more, and the host's seconds for a call."""
        for index in range(2):
            call(index)
        device, host = self._block(call, 2, 0.0)
        return max(1, min(20, math.ceil(2e-3 / max(device, 1e-9)))), host

    def _block(self, call: Callable[[int], Any], size: int, host: float) -> Time:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        torch.cuda._sleep(int(2 * size * host * CYCLES))
        begin.record()
        issued = time.perf_counter()
        for index in range(size):
            call(index)
        host = (time.perf_counter() - issued) / size
        end.record()
        self.synchronize()
        return Time(begin.elapsed_time(end) / 1e3 / size, host)

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
