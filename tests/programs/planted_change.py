"""A bug that is planted on purpose: a small change of a source."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Planted:
    name: str
    file: str  # in the repository
    old: str  # occurs once in it
    new: str
    breaks: str  # what is wrong then, and how it shows
    on_device: bool = False  # it shows on the asynchronous device: test_async_device.py must find it

    def occurrences(self, root: Path) -> int:
        return (root / self.file).read_text().count(self.old)

    @contextmanager
    def in_copy(self, root: Path) -> Iterator[None]:
        """The bug is in the sources under `root` for a while."""
        path = root / self.file
        sound = path.read_text()
        if sound.count(self.old) != 1:
            raise ValueError(f"{self.name}: expected its text once in {self.file}, got {sound.count(self.old)} times")
        path.write_text(sound.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(sound)
