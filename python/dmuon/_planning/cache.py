"""JSON files in the user's cache with measurements of this machine. No torch, so that the command starts at once."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dmuon import _plan

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("dmuon")


class CacheFile:
    """Rows that were measured under one key. The key holds everything else that the rows depend on.

    One process at a time replaces the whole file. So readers always find a whole file, even after a process was killed.
    """

    def __init__(self, kind: str, member: str, key: dict[str, Any]) -> None:
        """Names the file `kind`/<digest of the key>.json, which holds the rows as `member`."""
        self._member, self._key = member, json.loads(json.dumps(key))
        folder = cache_folder()
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / kind / f"{digest}.json" if folder else None

    def rows(self) -> Any:
        """Returns the rows, none if there is no file. Raises any error if the file is damaged or has another key."""
        try:
            held = json.loads(self.path.read_text()) if self.path else None
        except FileNotFoundError:
            return []
        if held is not None and held["key"] != self._key:
            raise ValueError(f"it has another key: {held['key']}")
        return [] if held is None else held[self._member]

    def replace(self, rows: Callable[[], list[Any]], what: str) -> None:
        """Stores the result of `rows`, which may read the file: no other process changes it meanwhile."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.parents[1] / "lock"):
                for left in self.path.parent.glob("*.tmp"):  # from a process that was killed
                    left.unlink(missing_ok=True)
                file = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
                try:
                    file.write_text(json.dumps({"key": self._key, self._member: rows()}))
                    file.replace(self.path)
                finally:
                    file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("dmuon: the %s were not kept: %s", what, error)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock, which the system releases when the process ends, even if it is killed."""
    with path.open("a") as file:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_folder() -> Path | None:
    """Returns `~/.cache/dmuon`, or the folder that DMUON_CACHE_DIR names. "" means none."""
    if (chosen := os.environ.get("DMUON_CACHE_DIR")) is not None:
        return Path(chosen) if chosen else None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if home.startswith("~") else Path(home) / "dmuon"  # there may be no home


def machine_key(device: torch.device) -> dict[str, Any]:
    """Returns the part of a file's key that every measurement on a device depends on."""
    import torch

    return {
        "device": device_name(device),
        "dmuon": _plan.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
    }


def device_name(device: torch.device) -> str:
    """Returns the maker's name of the device."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def steps_text(key: dict[str, Any]) -> str:
    """Returns the steps of Newton-Schulz in a key of tuned choices, in words."""
    rows = key["ns_coefficients"]
    return f"{len(rows)} steps from ({', '.join(f'{number:.4g}' for number in rows[0]) if rows else ''})"
