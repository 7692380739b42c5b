"""An accelerator without hardware, for tests: device type and c10d backend "emulated".

Importing this module registers them, and `torch.emulated`; tests/async_device/README.md says what they do. It loads
the extension that CMake's target `async_device` builds.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _extension

__all__ = [
    "ORDERS",
    "check_order",
    "configure",
    "cuda_counts",
    "has_cuda_kernels",
    "misplaced_cuda_kernels",
    "no_host_sync",
    "phase",
    "races",
    "recording",
    "replaying",
    "reset",
    "reset_statistics",
    "statistics",
    "use_cuda_kernels",
]

_native = _extension.load()

from . import _torch_module  # noqa: E402 - it needs the extension
from ._cuda_kernels import (  # noqa: E402
    cuda_counts,
    has_cuda_kernels,
    misplaced_cuda_kernels,
    use_cuda_kernels,
)
from ._groups import register_backend  # noqa: E402

_torch_module.register()
register_backend()


_settings: dict[str, Any] = {
    "order": os.environ.get("ASYNC_DEVICE_ORDER", "random"),
    "seed": int(os.environ.get("ASYNC_DEVICE_SEED", "0")),
    "races": os.environ.get("ASYNC_DEVICE_RACES", "record"),
    "syncs": os.environ.get("ASYNC_DEVICE_SYNCS", "count"),
    "poison": True,
    "idle_ms": 2.0,
    "stall_s": 1.0,
    "hang_s": 120.0,
}
_at_import = dict(_settings)
ORDERS = ("compute_first", "side_first", "random", "issue_order")


def configure(**changes: Any) -> dict[str, Any]:
    """Waits for all queued work, then changes settings. Forgets errors of the device.

    Args:
        **changes: `order` (one of ORDERS), `seed`, `races` ("raise", "record", "off"), `syncs` ("count", "raise"),
            `poison`, `idle_ms` after which the device starts by itself, `stall_s` after which a communication is looked
            into, `hang_s` that the host waits at most.

    Returns:
        All settings as they were before.

    Raises:
        ValueError: for a value that is none of these.
    """
    unknown = changes.keys() - _settings.keys()
    if unknown:
        raise ValueError(f"configure: settings are {', '.join(_settings)}; got {', '.join(sorted(unknown))}")
    before = dict(_settings)
    _native.configure(**{**before, **changes})
    _settings.update(changes)
    return before


def reset() -> None:
    """Waits for everything. Restores the environment's settings, clears the counts and forgets errors.

    New streams are then the first of their pools, as in a new process.
    """
    configure(**_at_import)
    _native.restart_pools()
    reset_statistics()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Counts the work of all threads of the process under this name meanwhile."""
    before = _native.enter_phase(name)
    try:
        yield
    finally:
        _native.enter_phase(before)


def statistics() -> dict[str, dict[str, Any]]:
    """Returns the counts of each phase ("" is outside of all); the README explains them."""
    return _native.statistics()


def reset_statistics() -> None:
    """Clears counts and races; the peak of memory becomes the memory in use."""
    _native.reset_statistics()


def races() -> list[str]:
    """Races since `reset_statistics`, each in a sentence."""
    return _native.races()


def check_order() -> None:
    """Compares the orders in which ranks have launched communication; all ranks call it.

    Raises:
        RuntimeError: two ranks launched common communication in different orders; NCCL may then wait for ever.
    """
    _native.check_order()


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """Makes a call raise if it would block the host on a GPU."""
    _native.raise_at_syncs(True)
    try:
        yield
    finally:
        _native.raise_at_syncs(_settings["syncs"] == "raise")


@dataclasses.dataclass
class Schedule:
    """The steps of the device; filled at the end of `recording`."""

    steps: list[int] = dataclasses.field(default_factory=list)
    observations: list[int] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def recording() -> Iterator[Schedule]:
    """Waits for all queued work, then records the device's steps meanwhile."""
    schedule = Schedule()
    _native.record_schedule()
    try:
        yield schedule
    finally:
        schedule.steps, schedule.observations = _native.stop_schedule()


@contextlib.contextmanager
def replaying(schedule: Schedule) -> Iterator[None]:
    """Makes the device repeat the recorded steps, whatever the order. The program must do the same, too."""
    _native.replay_schedule(schedule.steps, schedule.observations)
    try:
        yield
    finally:
        _native.stop_schedule()


def _schedule_file(folder: str) -> Path:
    return Path(folder) / f"schedule-{os.environ.get('RANK', '0')}.json"


def _record_to(folder: str) -> None:
    _native.record_schedule()

    def write() -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _schedule_file(folder).write_text(json.dumps(_native.stop_schedule()))

    atexit.register(write)


configure()
if folder := os.environ.get("ASYNC_DEVICE_RECORD"):
    _record_to(folder)
if folder := os.environ.get("ASYNC_DEVICE_REPLAY"):
    _native.replay_schedule(*json.loads(_schedule_file(folder).read_text()))
atexit.register(_native.stop)
