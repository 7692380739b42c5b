"""`Heads` lists the rows of each head, and refuses numbers that do not fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch.nn as nn
from dmuon.attention import Heads

import dmuon


@pytest.mark.parametrize(
    ("options", "query_rows", "key_rows"),
    [
        ({}, [0, 8, 16, 24], [0, 8, 16, 24]),
        ({"num_kv_heads": 2}, [0, 8, 16, 24], [0, 8]),
        ({"num_kv_heads": 1, "shared_dim": 4}, [0, 12, 24, 36], [0]),
        ({"key_rows": range(32, 64, 8)}, [0, 8, 16, 24], [32, 40, 48, 56]),
        ({"num_kv_heads": 2, "query_rows": [16, 24, 48, 56], "key_rows": [0, 32]}, [16, 24, 48, 56], [0, 32]),
    ],
    ids=str,
)
def test_rows_follow_each_other_unless_they_are_given(options, query_rows, key_rows):
    heads = Heads(4, 8, **options)
    assert (list(heads.query_rows), list(heads.key_rows)) == (query_rows, key_rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 0}, "num_heads: expected an integer from 1 on, got 0"),
        ({"head_dim": 2.0}, "head_dim: expected an integer from 1 on, got 2.0"),
        ({"num_kv_heads": -1}, "num_kv_heads: expected an integer from 1 on, got -1"),
        ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of the 4 heads, got 3"),
        ({"num_kv_heads": 3, "key_rows": [0]}, "num_kv_heads: expected a divisor of the 4 heads, got 3"),
        ({"shared_dim": -2}, "shared_dim: expected an integer from 0 on, got -2"),
        ({"query": 1}, "query: expected a path below the module, got 1"),
        ({"query_rows": [0, 8]}, "query_rows: expected the first rows of 4 heads that have 8 rows each, got (0, 8)"),
        ({"query_rows": [0, 8, 16, 20]}, "query_rows: expected the first rows of 4 heads that have 8 rows each"),
        ({"query_rows": [0, 8, 16, -8]}, "query_rows: expected"),
        ({"shared_dim": 1, "query_rows": [0, 8, 16, 24]}, "query_rows: expected the first rows of 4 heads that have 9"),
        ({"num_kv_heads": 2, "key_rows": [0, 7]}, "key_rows: expected the first rows of 2 heads that have 8 rows each"),
    ],
    ids=str,
)
def test_heads_that_do_not_fit_are_refused(options, words):
    with pytest.raises(ValueError, match="Heads: ") as error:
        Heads(**{"num_heads": 4, "head_dim": 8, **options})
    assert words in str(error.value)


class Titan(nn.Module):
    """Fused as torchtitan's GQAttention: each group has its query heads, a key and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = 4, 2, 3
        self.qkv_linear = nn.Module()
        self.qkv_linear.wqkv = nn.Linear(5, 24)


def test_the_table_knows_torchs_attention_and_torchtitans():
    by_class = dmuon.attention.by_class
    torchs = by_class[nn.MultiheadAttention](nn.MultiheadAttention(12, 3))
    assert (list(torchs.query_rows), list(torchs.key_rows)) == ([0, 4, 8], [12, 16, 20])
    titans = by_class["torchtitan.models.common.attention.GQAttention"](Titan())
    assert (list(titans.query_rows), list(titans.key_rows)) == ([0, 3, 12, 15], [6, 18])
    for refused in (nn.MultiheadAttention(12, 3, kdim=5), nn.MultiheadAttention(12, 3, add_bias_kv=True)):
        with pytest.raises(ValueError, match="expected"):
            by_class[nn.MultiheadAttention](refused)


def test_every_name_of_the_table_is_a_class():
    for key in dmuon.attention.by_class:
        if isinstance(key, str):  # sources are read, because torchtitan's need Triton
            package, *path, name = key.split(".")
            (root,) = importlib.util.find_spec(package).submodule_search_locations
            assert f"\nclass {name}(" in Path(root, *path).with_suffix(".py").read_text(), key
