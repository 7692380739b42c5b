"""A checksum of a tensor's bits."""

from __future__ import annotations

import functools

import torch

_PIECE = 1 << 12  # words; as many factors stay in memory
_PIECES_ON_CPU, _MOST_PIECES = 16, 1024  # at once: what stays in a CPU's cache, and for few launches elsewhere
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
    factors, powers = _factors(values.device)
    at_once = (_PIECES_ON_CPU if values.is_cpu else _MOST_PIECES) * _PIECE
    in_pieces = words.numel() // _PIECE * _PIECE
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for some in (*words[:in_pieces].split(at_once), words[in_pieces:]):
        if some.numel() > 0:
            pieces = some.view(-1, min(_PIECE, some.numel()))
            sums = (pieces * factors[: pieces.shape[1]]).sum(1)
            total = total * powers[-1 - len(pieces)] + (sums * powers[-len(pieces) :]).sum()
    return total


@functools.cache
def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns [_PIECE] odd random numbers, so that no bit of a word is lost, and descending powers of _STEP to 0."""
    lowest, highest = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    generator = torch.Generator("cpu").manual_seed(0)
    factors = torch.randint(lowest, highest, (_PIECE,), dtype=torch.int64, device="cpu", generator=generator) | 1
    powers = torch.full((_MOST_PIECES + 1,), _STEP, dtype=torch.int64, device="cpu")
    powers[0] = 1
    return factors.to(device), powers.cumprod(0).flip(0).to(device)
