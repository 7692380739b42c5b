"""A leaf's saved tensors have the leaf's first dimension, or are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dmuon._saving.owned_shards import OwnedShards


def shape_of(leaf: list[int], sizes: list[int]) -> torch.Size:
    transfers: Any = SimpleNamespace(sizes_of=lambda *_: sizes)
    leaves: Any = [SimpleNamespace(name="up.weight", shape=torch.Size(leaf), cut=None)]
    return OwnedShards(transfers, leaves, [torch.float32], ["mean"], ranks=None, mesh=None).shape(0, "mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("leaf", "sizes", "expected"),
    [([4, 3], [4, 3], [4, 3]), ([4, 3], [4], [4]), ([2, 4, 3], [8], [2, 4]), ([4, 3], [2, 6], [4, 3])],
)
def test_rows_of_a_tensor_belong_to_rows_of_its_leaf(leaf, sizes, expected):
    assert list(shape_of(leaf, sizes)) == expected


def test_a_tensor_that_the_rows_do_not_divide_is_refused_by_name():
    expected = "'up.weight': mean: expected a multiple of the matrix's 4 rows, got 6 elements"
    with pytest.raises(ValueError, match=expected):
        shape_of([4, 3], [6])
