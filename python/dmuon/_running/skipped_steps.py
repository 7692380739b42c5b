"""The count of steps that were left out, which only the device knows when they are taken."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger("dmuon")
KEY = "skipped_steps"  # in every group of an optimizer, with which it is saved and loaded


class SkippedSteps:
    """Counts on the device and tells the log, on an accelerator when the number has arrived: some steps later."""

    def __init__(self, device: torch.device, speaks: bool) -> None:
        """`speaks`: to the log; one rank does."""
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._speaks = speaks
        self._num_told = 0
        on_host = not speaks or device.type == "cpu"
        self._arriving = self.count if on_host else torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=True)
        self._arrived: torch.Event | None = None

    def add(self, applies: torch.Tensor) -> None:
        """A step was taken, or left out where `applies`, a [] bool, is false."""
        self.count += applies.logical_not()
        if not self._speaks:
            return
        if self.count.is_cpu:
            self._tell()
            return
        if self._arrived is not None:
            if not self._arrived.query():
                return
            self._tell()
        self._arriving.copy_(self.count, non_blocking=True)
        self._arrived = torch.Event(self.count.device)
        self._arrived.record()

    def take(self, groups: Sequence[dict[str, Any]]) -> None:
        """Goes on from what loaded groups say, and is in all of them from now on."""
        self.count.fill_(max((int(group[KEY]) for group in groups), default=0))
        self._arrived, self._num_told = None, int(self.count)
        for group in groups:
            group[KEY] = self.count

    def _tell(self) -> None:
        number = int(self._arriving)
        if number > self._num_told:
            logger.warning("dmuon: a gradient is not finite on some rank; step skipped on all (%d so far)", number)
        self._num_told = number
