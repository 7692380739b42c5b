"""Text as bytes: a file, or the sources of Python's own standard library."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def load_text(path: str | None, limit: int = 8_000_000) -> Tensor:
    """At most `limit` bytes as a uint8 tensor: of the file, else of the standard library in name order."""
    if path is not None:
        content = Path(path).read_bytes()[:limit]
    else:
        pieces, size = [], 0
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            pieces.append(source.read_bytes())
            size += len(pieces[-1])
            if size >= limit:
                break
        content = b"".join(pieces)[:limit]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


class Text:
    """Training and validation batches that depend on (seed, step, rank) alone.

    The last tenth of the text is for validation.
    """

    def __init__(self, content: Tensor, batch: int, sequence: int, seed: int, device: torch.device) -> None:
        split = len(content) * 9 // 10
        self._train, self._validation = content[:split], content[split:]
        if len(self._validation) <= sequence:
            raise ValueError(f"Text: content must be longer than {10 * (sequence + 1)} bytes; got {len(content)}")
        self._batch, self._sequence, self._seed, self._device = batch, sequence, seed, device

    def train_batch(self, step: int, rank: int) -> Batch:
        """Inputs and targets, [batch, sequence] int64 each; targets are one byte ahead."""
        return self._draw(self._train, f"train {self._seed} {step} {rank}")

    def validation_batch(self, index: int, rank: int) -> Batch:
        """As `train_batch`, from the held-out tenth; the same at every call."""
        return self._draw(self._validation, f"validation {index} {rank}")

    def _draw(self, content: Tensor, key: str) -> Batch:
        # Seeding with a string hashes it: neighbouring steps and ranks get unrelated streams.
        stream = random.Random(key)
        starts = [stream.randrange(len(content) - self._sequence) for _ in range(self._batch)]
        rows = torch.stack([content[start : start + self._sequence + 1] for start in starts])
        rows = rows.to(self._device, torch.int64)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
