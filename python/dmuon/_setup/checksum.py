"""A checksum of a tensor's bits."""

from __future__ import annotations

import torch

_PIECE = 1 << 16  # words that stay in a CPU's cache
_MORE_ON_DEVICES = 64  # times as many words elsewhere, for few launches
_STEP = 0x9E3779B1  # odd, so that no piece is lost among those before it


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Returns [] int64 on the tensor's device: equal for equal bits, and almost never equal for others.

    Multiplies each 32-bit word by a random 64-bit number of its place and sums the products modulo 2^64. So NaNs and
    the sign of zero count like other bits, and the order of values counts. One pass. Does not wait for the device.
    """
    flat = values.detach().contiguous().view(-1)
    num_bytes = flat.numel() * flat.itemsize
    word = next(word for word in (torch.int32, torch.int16, torch.uint8) if num_bytes % word.itemsize == 0)
    if flat.storage_offset() * flat.itemsize % word.itemsize:
        flat = flat.clone()  # words must lie at multiples of their size
    words = flat.view(torch.uint8).view(word)
    lowest, highest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    generator = torch.Generator("cpu").manual_seed(0)
    most = _PIECE if values.is_cpu else _MORE_ON_DEVICES * _PIECE
    size = (min(words.numel(), most),)
    factors = torch.randint(lowest, highest, size, dtype=torch.int64, device="cpu", generator=generator)
    factors = (factors | 1).to(values.device)  # odd, so that no bit of a word is lost
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for piece in words.split(most):
        total = total * _STEP + (piece * factors[: piece.numel()]).sum()
    return total
