"""Heads: which rows of an attention module's projections make the query and the key of each head.

`dmuon.QKClip` asks `by_class` for the heads of each module. Add your own class before `QKClip`, the same on all ranks:

    dmuon.attention.by_class[MyAttention] = lambda module: dmuon.attention.Heads(
        module.num_heads, module.head_dim, query="wq", key="wk"
    )
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn as nn


@dataclasses.dataclass(frozen=True)
class Heads:
    """The heads of an attention module.

    Attributes:
        num_heads: number of query heads.
        head_dim: rows of a head in the projections of queries and of keys, without `shared_dim`.
        num_kv_heads: number of key heads, each for as many neighbouring query heads. None means `num_heads`.
        query: path below the module of the projection that makes queries, or of its weight.
        key: the same of keys. May be the same projection, if it is fused.
        query_rows: first row of each query head in its projection. Empty: one head after the other from row 0.
        key_rows: the same of each key head.
        shared_dim: rows of a query head, behind its `head_dim` rows, whose key all heads share. In multi-head latent
            attention (MLA) these are the part with positions.
        normed: True if a norm of queries or keys comes behind their projection. Then the rows' size has no effect.

    Raises:
        ValueError: a number is not positive, `num_kv_heads` does not divide `num_heads`, or the rows overlap.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    query: str = "q_proj"
    key: str = "k_proj"
    query_rows: Sequence[int] = ()
    key_rows: Sequence[int] = ()
    shared_dim: int = 0
    normed: bool = False

    def __post_init__(self) -> None:
        for field in ("num_heads", "head_dim", "num_kv_heads", "shared_dim"):
            value, least = getattr(self, field), 0 if field == "shared_dim" else 1
            if not (type(value) is int and value >= least) and not (field == "num_kv_heads" and value is None):
                raise ValueError(f"Heads: {field}: expected an integer from {least} on, got {value!r}")
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"Heads: num_kv_heads: expected a divisor of the {self.num_heads} heads, got {self.num_kv_heads}"
            )
        for field in ("query", "key"):
            if not isinstance(getattr(self, field), str):
                raise ValueError(f"Heads: {field}: expected a path below the module, got {getattr(self, field)!r}")
        query_dim = self.head_dim + self.shared_dim
        for field, count, step in (
            ("query_rows", self.num_heads, query_dim),
            ("key_rows", self.kv_heads, self.head_dim),
        ):
            rows = getattr(self, field)
            if not isinstance(rows, Sequence):
                raise ValueError(f"Heads: {field}: expected a sequence of rows, got {rows!r}")
            rows = tuple(rows) if len(rows) else range(0, count * step, step)
            in_order = sorted(rows) if all(type(row) is int and row >= 0 for row in rows) else []
            if len(in_order) != count or any(b - a < step for a, b in itertools.pairwise(in_order)):
                raise ValueError(
                    f"Heads: {field}: expected the first rows of {count} heads that have {step} rows each, got {rows}"
                )
            object.__setattr__(self, field, rows)

    @property
    def kv_heads(self) -> int:
        """The number of key heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


def grouped(module: Any, query: str = "q_proj", key: str = "k_proj") -> Heads:
    """Returns the heads of a module with a `head_dim` and one projection each for queries and keys, as Llama has them.

    The numbers of heads follow from the projections' rows. A child `q_norm` or `k_norm` counts as a norm of heads.
    """
    head_dim = module.head_dim
    rows = [module.get_parameter(f"{path}.weight").shape[0] for path in (query, key)]
    if any(of % head_dim for of in rows):
        raise ValueError(f"expected projections whose rows are heads of {head_dim} rows, got {rows[0]} and {rows[1]}")
    num_heads, num_kv_heads = (of // head_dim for of in rows)
    return Heads(num_heads, head_dim, num_kv_heads, query, key, normed=_has_norm(module))


def latent(module: Any, num_heads: int, query: str, key: str) -> Heads:
    """Returns the heads of multi-head latent attention, as DeepSeek-V3 has it. `key` makes keys and values."""
    nope, step = module.qk_nope_head_dim, module.qk_nope_head_dim + module.v_head_dim
    rows = range(0, num_heads * step, step)
    return Heads(num_heads, nope, query=query, key=key, key_rows=rows, shared_dim=module.qk_rope_head_dim)


def _has_norm(module: Any) -> bool:
    return any(getattr(module, name, None) is not None for name in ("q_norm", "k_norm"))


def _multi_head(module: Any) -> Heads:
    if getattr(module, "q_proj_weight", None) is not None:
        raise ValueError("expected queries, keys and values of one size, got kdim or vdim")
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("expected neither add_bias_kv nor add_zero_attn, whose keys are no projections")
    width, dim = module.embed_dim, module.head_dim
    fused = "in_proj_weight"
    return Heads(module.num_heads, dim, query=fused, key=fused, key_rows=range(width, 2 * width, dim))


def _deepseek(module: Any) -> Heads:
    return latent(module, module.num_heads, "q_proj" if module.q_lora_rank is None else "q_b_proj", "kv_b_proj")


def _titan_grouped(module: Any) -> Heads:
    if hasattr(module.qkv_linear, "wq"):
        return grouped(module, "qkv_linear.wq", "qkv_linear.wk")
    # A group of the fused projection has its query heads, a key head and a value head.
    dim, num_groups = module.head_dim, module.n_kv_heads
    in_group = module.n_heads // num_groups
    step = (in_group + 2) * dim
    return Heads(
        module.n_heads,
        dim,
        num_groups,
        query="qkv_linear.wqkv",
        key="qkv_linear.wqkv",
        query_rows=[group * step + head * dim for group in range(num_groups) for head in range(in_group)],
        key_rows=range(in_group * dim, num_groups * step, step),
        normed=_has_norm(module),
    )


def _titan_latent(module: Any) -> Heads:
    return latent(module, module.n_heads, "wq_b" if module.q_lora_rank else "wq", "wkv_b")


by_class: dict[type[nn.Module] | str, Callable[[Any], Heads | None]] = {
    nn.MultiheadAttention: _multi_head,
    **{
        f"transformers.models.{path}Attention": grouped
        for path in (
            "llama.modeling_llama.Llama",
            "mistral.modeling_mistral.Mistral",
            "mixtral.modeling_mixtral.Mixtral",
            "qwen2.modeling_qwen2.Qwen2",
            "qwen2_moe.modeling_qwen2_moe.Qwen2Moe",
            "qwen3.modeling_qwen3.Qwen3",
            "qwen3_moe.modeling_qwen3_moe.Qwen3Moe",
        )
    },
    "transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention": _deepseek,
    "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3Attention": _deepseek,
    "torchtitan.models.common.attention.GQAttention": _titan_grouped,
    "torchtitan.models.deepseek_v3.model.Attention": _titan_latent,
}
"""The heads of attention modules, by class: a function of a module returns its `Heads`, or None to leave it out.

A key is a class or its qualified name; the nearest base class counts.
"""
