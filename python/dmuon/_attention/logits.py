"""The largest logit of each head, from the operands of an attention."""

from __future__ import annotations

import inspect
import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor import DTensor
from torch.nn.attention.bias import CausalBias, CausalVariant

_PIECE = 1 << 24  # logits at once, on CPUs
_MORE_ON_DEVICES = 8  # times as many elsewhere, for few launches
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


class NoLogitsError(Exception):
    """A call's operands are of a kind that shows no logits, which the text names."""


def _require_plain(*operands: torch.Tensor | None) -> None:
    """Raises NoLogitsError for nested tensors and DTensors."""
    for operand in operands:
        if operand is not None and (operand.is_nested or isinstance(operand, DTensor)):
            raise NoLogitsError("nested tensors" if operand.is_nested else "DTensors")


def of_operands(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Returns the largest logit of each head, [heads] fp32, over the pairs that the mask admits.

    Computes Q K' in pieces of 16 million logits at most (or one row), of 134 million on devices, in the operands'
    dtype, as attention does. -inf if there is no pair.

    Args:
        query: [..., heads, L, dim].
        key: [..., kv heads, S, dim]. Each key head serves as many neighbouring query heads.
        mask: broadcasts to [..., heads, L, S]; bool, True admits a pair; or floats, which are added.
        is_causal: True admits pairs of a query i and keys j <= i + first.
        scale: factor of Q K'. None means 1 / sqrt(dim).
        first: the last key of the first query.
    """
    num_heads, num_groups = query.shape[-3], key.shape[-3]
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    largest = torch.full((num_heads,), -math.inf, dtype=torch.float32, device=query.device)
    if not query.numel() or not key.numel():
        return largest
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    batch = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3]).numel()
    most = _PIECE if query.is_cpu else _MORE_ON_DEVICES * _PIECE
    at_once = max(1, most // (batch * num_heads * num_keys))
    transposed = key.transpose(-2, -1)
    for begin in range(0, num_queries, at_once):
        end = min(begin + at_once, num_queries)
        num_seen = min(end + first, num_keys) if is_causal else num_keys
        if num_seen <= 0:
            continue
        # Scaled first: in fp16 the product alone may overflow where attention's logits do not.
        rows = (query[..., begin:end, :] * scale).unflatten(-3, (num_groups, -1)).flatten(-3, -2)
        logits = rows @ transposed[..., :num_seen]
        logits = logits.unflatten(-2, (-1, end - begin)).flatten(-4, -3)
        if is_causal:
            seen_by_all = max(0, begin + first + 1)  # keys
            later = torch.ones(end - begin, max(0, num_seen - seen_by_all), dtype=torch.bool, device=query.device)
            logits[..., seen_by_all:].masked_fill_(later.triu_(begin + first + 1 - seen_by_all), -math.inf)
        if mask is not None:
            logits = _masked(logits, mask, begin, end)
        largest = torch.maximum(largest, logits.amax((-2, -1)).view(-1, num_heads).amax(0).float())
    return largest


def _masked(logits: torch.Tensor, mask: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Returns the logits of queries [begin, end) with a mask of all queries."""
    of_rows = mask if mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., begin:end, :]
    if mask.dtype == torch.bool:
        return logits.masked_fill(of_rows.logical_not(), -math.inf)
    return logits + of_rows


def of_scaled_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Returns [heads] fp32 from the arguments of torch's scaled_dot_product_attention.

    None unless queries are [batch, heads, L, dim]: the first of three dimensions may be a batch. None, too, unless the
    number of key heads divides the number of query heads.

    Raises:
        NoLogitsError: an operand is no plain tensor.
    """
    first = 0
    if isinstance(attn_mask, CausalBias):  # it says what it is, and its elements are not set
        if attn_mask.variant == CausalVariant.LOWER_RIGHT:
            first = attn_mask.seq_len_kv - attn_mask.seq_len_q
        attn_mask, is_causal = None, True
    _require_plain(query, key, attn_mask)
    if query.ndim < 4 or key.ndim < 4 or query.shape[-3] % max(1, key.shape[-3]):
        return None
    return of_operands(query, key, attn_mask, is_causal, scale, first)


def of_softmax(input: torch.Tensor, dim: int | None = None, *rest: object, **options: object) -> torch.Tensor | None:
    """Returns [heads] fp32 from the arguments of a softmax of logits, [..., heads, L, S]. None for another softmax.

    Raises:
        NoLogitsError: the input is no plain tensor.
    """
    _require_plain(input)
    if input.ndim < 4 or dim not in (-1, input.ndim - 1) or not input.numel():
        return None
    return input.amax((-2, -1)).flatten(0, -2).amax(0).float()


def of_multi_head(*args: object, **options: object) -> torch.Tensor:
    """Returns [heads] fp32 from the arguments of torch's multi_head_attention_forward, with a fused in_proj_weight.

    Projects queries and keys once more, because that function gives the projected ones to no call that is seen.

    Raises:
        NoLogitsError: an operand is no plain tensor.
    """
    given = _MULTI_HEAD.bind(*args, **options).arguments
    query, key = given["query"], given["key"]  # [L, batch, width], or [L, width]
    _require_plain(query, key)
    width, num_heads = query.shape[-1], given["num_heads"]
    weight, bias = given["in_proj_weight"].detach(), given["in_proj_bias"]
    projected = [
        F.linear(x, weight[begin : begin + width], None if bias is None else bias[begin : begin + width])
        for x, begin in ((query, 0), (key, width))
    ]
    # [L, batch * width] -> [batch, heads, L, dim]
    q, k = (x.view(len(x), -1, num_heads, width // num_heads).permute(1, 2, 0, 3) for x in projected)
    masks = [given.get("attn_mask"), given.get("key_padding_mask")]
    added = [_added(mask, q) for mask in masks if mask is not None]
    if masks[0] is not None and masks[0].ndim == 3:
        added[0] = added[0].unflatten(0, (-1, num_heads))
    if masks[1] is not None:
        added[-1] = added[-1].view(-1, 1, 1, added[-1].shape[-1])
    return of_operands(q, k, sum(added[1:], start=added[0]) if added else None)


def _added(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a mask that is added, of one in which True excludes a pair, or that is added itself."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill_(mask, -math.inf)
