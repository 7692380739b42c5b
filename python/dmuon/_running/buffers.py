"""Buffers that all ranks take from the first one, as under DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn

from dmuon import _C
from dmuon._running.blocking import blocking_message
from dmuon._running.structures import is_transformed
from dmuon._setup.dedication import Dedication
from dmuon._setup.groups import slots_group
from dmuon._setup.slices import local_part


def copies_buffers(dedication: Dedication) -> bool:
    """Returns True if all ranks take their buffers from the first one."""
    given = dedication.across_ranks.broadcast_buffers
    return dedication.schedule.replicated if given is None else given


class Buffers:
    """Copies the model's buffers from the mesh's first rank to all others, if `copies_buffers`.

    It does so before the first forward, and before a forward after one that trained outside of `no_sync`. So a forward
    that only evaluates takes them once. Computes on the current stream.
    """

    def __init__(self, model: nn.Module, dedication: Dedication) -> None:
        """Makes no group that `start` has not made."""
        self._model, self._ranks = model, dedication.ranks
        self._is_due = copies_buffers(dedication)
        self._group = slots_group(self._ranks) if self._is_due else None

    def begin_forward(self, engine: _C.Engine, syncs: bool) -> None:
        """Copies them if they may differ. Collective then. `syncs`: the forward's backward is not under `no_sync`."""
        if self._group is None or _C.in_backward() or is_transformed():
            return
        is_due, self._is_due = self._is_due, syncs and torch.is_grad_enabled()
        parts = [part for part in map(local_part, self._model.buffers()) if part.numel()] if is_due else []
        if not parts:
            return
        pieces = [_bytes_of(part).to(self._ranks.device) for part in parts]
        flat = torch.cat(pieces)
        with blocking_message(engine, "the copy of buffers from the first rank"):
            dist.broadcast(flat, self._ranks.by_slot[0], group=self._group)
        with torch.no_grad():  # also the first rank writes: what autograd says of it, all ranks hear
            for part, bytes_ in zip(parts, flat.split([piece.numel() for piece in pieces]), strict=True):
                part.copy_(bytes_.clone().view(part.dtype).view(part.shape))


def _bytes_of(part: torch.Tensor) -> torch.Tensor:
    return part.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
