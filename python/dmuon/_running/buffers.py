"""Buffers that all ranks take from the first one, as under DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn

from dmuon import _C
from dmuon._setup.groups import slots_group
from dmuon._setup.ranks import Ranks


class Buffers:
    """Copies the model's buffers from the mesh's first rank to all others.

    It does so before the first forward, and before a forward after one that trained outside of `no_sync`. So a forward
    that only evaluates takes them once. Computes on the current stream.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._group = slots_group(ranks)
        self._is_due = True

    def begin_forward(self, engine: _C.Engine, syncs: bool) -> None:
        """Copies them if they may differ. Collective then. `syncs`: the forward's backward is not under `no_sync`."""
        is_due, self._is_due = self._is_due, syncs and torch.is_grad_enabled()
        buffers = [buffer for buffer in self._model.buffers() if buffer.numel()] if is_due else []
        if self._group is None or not buffers:
            return
        what = "the copy of buffers from the first rank"
        engine.leave(what)
        device = torch.device(self._ranks.device_type)
        pieces = [buffer.detach().flatten().view(torch.uint8).to(device) for buffer in buffers]
        flat = torch.cat(pieces)
        try:
            dist.broadcast(flat, self._ranks.by_slot[0], group=self._group)
        except RuntimeError as error:
            raise RuntimeError(f"dmuon: {what} failed: a rank died, or did not come. Reported: {error}") from error
        if self._ranks.slot == 0:
            return
        with torch.no_grad():
            for buffer, bytes_ in zip(buffers, flat.split([piece.numel() for piece in pieces]), strict=True):
                buffer.copy_(bytes_.clone().view(buffer.dtype).view(buffer.shape))
