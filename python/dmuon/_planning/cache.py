"""What was measured on this machine, in JSON files of the user's cache. No torch: the command starts at once."""

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


class KeptFile:
    """Rows that were measured under one key, which is all that they depend on besides what they say themselves.

    A file is replaced whole, by one process at a time, so whoever reads or is killed finds one that is whole.
    """

    def __init__(self, kind: str, member: str, key: dict[str, Any]) -> None:
        """The file `kind`/<digest of the key>.json, which has the rows as `member`."""
        self._member, self._key = member, json.loads(json.dumps(key))
        folder = cache_folder()
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self.path = folder / kind / f"{digest}.json" if folder else None

    def rows(self) -> Any:
        """What is kept, nothing if there is no file. Raises any error where the file is damaged or another key's."""
        try:
            kept = json.loads(self.path.read_text()) if self.path else None
        except FileNotFoundError:
            return []
        if kept is not None and kept["key"] != self._key:
            raise ValueError(f"it has another key: {kept['key']}")
        return [] if kept is None else kept[self._member]

    def replace(self, rows: Callable[[], list[Any]], what: str) -> None:
        """Keeps what `rows` returns, which may read the file: nobody else changes it meanwhile."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.parents[1] / "lock"):
                for left in self.path.parent.glob("*.tmp"):  # by a process that was killed
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
    """The system gives it back when the process ends, however it does."""
    with path.open("a") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_folder() -> Path | None:
    """`~/.cache/dmuon`; DMUON_CACHE_DIR names another one, "" none."""
    if (chosen := os.environ.get("DMUON_CACHE_DIR")) is not None:
        return Path(chosen) if chosen else None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return None if home.startswith("~") else Path(home) / "dmuon"  # there may be no home


def machine_key(device: torch.device) -> dict[str, Any]:
    """What all that is measured on a device depends on: part of its file's key."""
    import torch

    return {
        "device": device_name(device),
        "dmuon": _plan.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
    }


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
