"""A number of a tensor's bits."""

from __future__ import annotations

import torch

_PIECE = 1 << 18  # elements: what is held beside the tensor
_STEP = 0x9E3779B1  # odd, so that no piece is lost among those before it


def checksum(values: torch.Tensor) -> torch.Tensor:
    """[] int64 on the tensor's device: equal where the bits are, and as good as never where they are not.

    The sum of all words, each times a random number of its place, modulo 2^64: so NaNs and the sign of zero count like
    other bits, and what ranks have in another order differs. One pass; nothing waits for the device.
    """
    word = {1: torch.uint8, 2: torch.int16}.get(values.itemsize, torch.int32)
    words = values.detach().contiguous().view(-1).view(word)
    lowest, highest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    generator = torch.Generator("cpu").manual_seed(0)
    size = (min(words.numel(), _PIECE),)
    factors = torch.randint(lowest, highest, size, dtype=torch.int64, device="cpu", generator=generator)
    factors = factors.to(values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for piece in words.split(_PIECE):
        total = total * _STEP + (piece * factors[: piece.numel()]).sum()
    return total
