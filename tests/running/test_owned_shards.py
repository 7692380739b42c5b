"""A leaf's saved tensors have as many rows as the leaf has, or rows of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dmuon._saving.owned_shards import OwnedShards


def shape_of(leaf: list[int], sizes: list[int], rows: int) -> torch.Size:
    transfers: Any = SimpleNamespace(sizes_of=lambda *_: sizes, rows_of=lambda *_: rows)
    leaves: Any = [SimpleNamespace(name="up.weight", shape=torch.Size(leaf), cut=None)]
    return OwnedShards(transfers, leaves, ["mean"], ranks=None, mesh=None).shape(0, "mean")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("leaf", "sizes", "rows", "expected"),
    [
        ([4, 3], [4, 3], 4, [4, 3]),
        ([4, 3], [4], 4, [4]),
        ([2, 4, 3], [8], 2, [2, 4]),
        ([4, 3], [2, 6], 4, [4, 3]),
        ([4, 3], [1, 3], 1, [1, 3]),
        ([4, 3], [6], 6, [6]),
    ],
)
def test_a_tensor_is_cut_by_the_rows_that_the_engine_names(leaf, sizes, rows, expected):
    assert list(shape_of(leaf, sizes, rows)) == expected
