"""The largest logit of each head equals the one of all logits, whatever the mask, the groups and the pieces."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from dmuon._attention import logits, observer
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left


def all_logits(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """[batch, heads, L, S] fp64, head by head."""
    in_group = q.shape[1] // k.shape[1]
    heads = [q[:, h].double() @ k[:, h // in_group].double().mT * scale for h in range(q.shape[1])]
    return torch.stack(heads, 1)


def operands(heads: int = 4, groups: int = 2, queries: int = 5, keys: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(queries + 10 * keys)
    return torch.randn(3, heads, queries, 6, generator=generator), torch.randn(3, groups, keys, 6, generator=generator)


def test_largest_logits_fit_fp16_where_products_do_not():
    q = torch.full((1, 2, 3, 128), 24.0, dtype=torch.float16)
    largest = logits.of_operands(q, q)
    assert torch.allclose(largest, torch.full((2,), 24.0**2 * 128**0.5), rtol=1e-3)


@pytest.mark.parametrize("piece", [1, 7, 1 << 24])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (4, 7), (7, 4), (1, 1)])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "bool of rows", "floats", "floats of heads"])
def test_largest_logits_are_those_of_all(monkeypatch, piece, queries, keys, groups, mask):
    monkeypatch.setattr(logits, "_PIECE", piece)
    q, k = operands(4, groups, queries, keys)
    expected = all_logits(q, k, 0.3)
    given = None
    if mask == "causal":
        later = torch.arange(keys)[None] > torch.arange(queries)[:, None]
        expected = expected.masked_fill(later, -math.inf)
    elif "bool" in mask:
        given = torch.rand(3, 1, queries if "rows" not in mask else 1, keys) > 0.5
        expected = expected.masked_fill(~given, -math.inf)
    elif "floats" in mask:
        given = torch.randn(3, 4 if "heads" in mask else 1, queries, keys)
        expected = expected + given
    found = logits.of_scaled_dot_product(q, k, k, given, 0.0, mask == "causal", scale=0.3, enable_gqa=groups < 4)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.amax((0, 2, 3)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (4, 7), (7, 4)])
@pytest.mark.parametrize(
    ("bias", "first"), [(causal_upper_left, lambda *_: 0), (causal_lower_right, lambda q, k: k - q)]
)
def test_a_causal_bias_admits_pairs_whatever_its_memory_holds(queries, keys, bias, first):
    q, k = operands(4, 2, queries, keys)
    mask = bias(queries, keys)
    torch.Tensor.fill_(mask.as_subclass(torch.Tensor), 1e6)
    later = torch.arange(keys)[None] > torch.arange(queries)[:, None] + first(queries, keys)
    expected = all_logits(q, k, 0.3).masked_fill(later, -math.inf)
    assert isinstance(mask, CausalBias)
    found = logits.of_scaled_dot_product(q, k, k, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found.double(), expected.amax((0, 2, 3)), rtol=1e-5, atol=1e-6)


def test_attention_of_nested_tensors_runs_and_shows_no_logits():
    rows = [torch.randn(length, 4, 6) for length in (3, 5)]
    q = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with observer._Calls(lambda *_: False, 4) as calls:
        F.scaled_dot_product_attention(q, q, q)
    assert not calls.has_shown and calls.unnoted == []
    assert calls.other == "scaled_dot_product_attention of nested tensors"


def test_the_scale_is_attentions_and_heads_need_no_batch():
    q, k = operands(groups=4)
    expected = all_logits(q, k, 6**-0.5).amax((0, 2, 3)).float()
    torch.testing.assert_close(logits.of_operands(q, k), expected)
    torch.testing.assert_close(
        logits.of_operands(q[0], k[0]), all_logits(q[:1], k[:1], 6**-0.5).amax((0, 2, 3)).float()
    )
    assert logits.of_scaled_dot_product(q[0, 0], k[0, 0], k[0, 0]) is None  # without a dimension of heads


def test_no_pair_has_no_logit_and_a_nan_stays():
    q, k = operands(groups=4)
    assert logits.of_operands(q[:0], k[:0]).tolist() == [-math.inf] * 4
    assert logits.of_operands(q, k, torch.zeros(5, 5, dtype=torch.bool)).tolist() == [-math.inf] * 4
    q[0, 1, 0, 0] = math.nan
    assert logits.of_operands(q, k).isnan().tolist() == [False, True, False, False]


def test_a_softmax_of_logits_has_heads_and_another_has_none():
    x = torch.randn(3, 4, 5, 5)
    assert logits.of_softmax(x, dim=-1).equal(x.amax((0, 2, 3)))
    assert logits.of_softmax(x, -1, torch.float32).equal(logits.of_softmax(x, 3))
    assert logits.of_softmax(x, 1) is None
    assert logits.of_softmax(x[0], -1) is None


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("mask", ["none", "bool", "floats", "of heads", "padding", "both"])
def test_torchs_multi_head_attention(batch, mask):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 4)
    nn.init.normal_(layer.in_proj_bias)
    x, y = torch.randn(5, *batch, 12), torch.randn(7, *batch, 12)
    given = {
        "bool": {"attn_mask": torch.rand(5, 7) > 0.6},
        "floats": {"attn_mask": torch.randn(5, 7)},
        "of heads": {"attn_mask": torch.randn(4 * (batch or (1,))[0], 5, 7)},
        "padding": {"key_padding_mask": torch.rand(*batch, 7) > 0.6},
        "both": {"attn_mask": torch.randn(5, 7), "key_padding_mask": torch.randn(*batch, 7)},
    }.get(mask, {})
    seen = {}
    softmax = F.softmax

    def kept(values: torch.Tensor, dim: int) -> torch.Tensor:
        seen["logits"] = values
        return softmax(values, dim=dim)

    with pytest.MonkeyPatch.context() as patch:  # torch's own path with weights computes logits in full
        patch.setattr(F, "softmax", kept)
        layer(x, y, y, **given)
    expected = seen["logits"].view(-1, 4, 5, 7).amax((0, 2, 3))
    options = {"key_padding_mask": given.get("key_padding_mask"), "attn_mask": given.get("attn_mask")}
    biases = (layer.bias_k, layer.bias_v, False, 0.0, layer.out_proj.weight, layer.out_proj.bias)
    found = logits.of_multi_head(x, y, y, 12, 4, layer.in_proj_weight, layer.in_proj_bias, *biases, **options)
    torch.testing.assert_close(found, expected)
