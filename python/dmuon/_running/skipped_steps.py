"""The count of skipped steps, which at first only the device knows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger("dmuon")
KEY = "skipped_steps"  # in every group of an optimizer, so that it is saved and loaded


class SkippedSteps:
    """Counts on the device and logs. On an accelerator the number arrives, and is logged, some steps later."""

    def __init__(self, device: torch.device, speaks: bool) -> None:
        """`speaks`: True on the one rank that logs."""
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._speaks = speaks
        self._num_logged = 0
        on_host = not speaks or device.type == "cpu"
        self._arriving = self.count if on_host else torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=True)
        self._arrived: torch.Event | None = None

    def add(self, applies: torch.Tensor) -> None:
        """Counts a step as skipped if `applies`, a [] bool, is false."""
        self.count += applies.logical_not()
        if not self._speaks:
            return
        if self.count.is_cpu:
            self._log()
            return
        if self._arrived is not None:
            if not self._arrived.query():
                return
            self._log()
        self._arriving.copy_(self.count, non_blocking=True)
        self._arrived = torch.Event(self.count.device)
        self._arrived.record()

    def load(self, groups: Sequence[dict[str, Any]]) -> None:
        """Continues with the count of loaded groups, and puts itself into all of them."""
        self.count.fill_(max((int(group.get(KEY, 0)) for group in groups), default=0))
        self._arrived, self._num_logged = None, int(self.count)
        for group in groups:
            group[KEY] = self.count

    def _log(self) -> None:
        number = int(self._arriving)
        if number > self._num_logged:
            logger.warning("dmuon: a gradient is not finite on some rank; step skipped on all (%d so far)", number)
        self._num_logged = number
