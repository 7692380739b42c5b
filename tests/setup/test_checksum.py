"""Checksums are equal where all bits are, and differ where one bit or the order does."""

from __future__ import annotations

import math

import pytest
import torch
from dmuon._setup.checksum import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8]


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (100 * torch.rand(shape, generator=torch.Generator().manual_seed(1))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (601, 911)])
def test_a_copy_has_the_same_and_one_bit_changes_it(dtype, shape):
    values = drawn(dtype, *shape)
    changed = values.clone()
    changed.view(-1)[-1:].view(torch.uint8)[0] ^= 1
    assert int(checksum(values)) == int(checksum(values.clone()))
    assert int(checksum(values)) != int(checksum(changed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bit_of_any_value_changes_it(dtype):
    values = drawn(dtype, 16)
    of_bytes = values.view(torch.uint8)
    sums = {int(checksum(values))}
    for place in range(len(of_bytes)):
        for bit in range(8):
            of_bytes[place] ^= 1 << bit
            sums.add(int(checksum(values)))
            of_bytes[place] ^= 1 << bit
    assert len(sums) == 1 + 8 * len(of_bytes)


def test_where_a_tensor_begins_in_memory_does_not_count():
    values = drawn(torch.float32, 7)
    assert int(checksum(values[1:])) == int(checksum(values[1:].clone()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_order_counts_inside_a_piece_and_of_pieces(dtype):
    values = drawn(dtype, 1024, 1024)
    orders = [values, values.T, values.flip(0), values.roll(512, 0), values.roll(1, 1), values[torch.randperm(1024)]]
    assert len({int(checksum(order)) for order in orders}) == len(orders)


def test_bits_count_that_compare_alike_or_not_at_all():
    values = torch.zeros(7)
    same = {int(checksum(values)) for values in (values, values.clone())}
    nan, other_nan = values.clone().fill_(math.nan), values.clone().fill_(math.nan)
    other_nan.view(torch.int32)[3] ^= 1
    sums = [int(checksum(x)) for x in (values, -values, nan, other_nan, values.clone().fill_(math.inf))]
    assert len(same) == 1 and len(set(sums)) == len(sums)
    assert int(checksum(nan)) == int(checksum(nan.clone()))


def test_nothing_has_a_checksum_and_random_numbers_stay():
    state = torch.get_rng_state()
    assert int(checksum(torch.empty(0, 3))) == 0
    checksum(torch.ones(3))
    assert torch.equal(state, torch.get_rng_state())
