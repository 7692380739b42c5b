"""A small GPT on bytes, or with more tokens than text has: pre-norm blocks, learned positions, an untied head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

BYTES = 256


def multiplies_bf16() -> bool:
    """True if PyTorch multiplies bf16 matrices here by instructions for it. Without these it is 10 to 60 times slower
    than in fp32."""
    return torch.cuda.is_available() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Products(torch.autograd.Function):
    """The products of a linear layer in fp32. Operands, result and gradients stay bf16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        wide = gradient.float()
        of_weight = wide.flatten(0, -2).T @ x.float().flatten(0, -2)
        return (wide @ weight.float()).to(x.dtype), of_weight.to(weight.dtype)


class Linear(nn.Linear):
    """A linear layer that multiplies bf16 in fp32 where the processor has no instructions for bf16."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16 or multiplies_bf16():
            return super().forward(x)
        y: Tensor = _Products.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return y


@dataclass(frozen=True)
class GPTConfig:
    """Sizes; `width` is a multiple of `num_heads`, `sequence` the longest input in tokens."""

    num_layers: int = 4
    width: int = 384
    num_heads: int = 6
    sequence: int = 64
    towers: int = 1  # 2: as pi0, see Towers
    vocabulary: int = BYTES  # tokens


class Attention(nn.Module):
    """Causal self-attention: input and output are [batch, sequence, width]."""

    def __init__(self, config: GPTConfig, width: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = Linear(width, 3 * config.width)
        self.out = Linear(config.width, width)

    def forward(self, x: Tensor) -> Tensor:
        merged: Tensor = self.out(attend(self.qkv(x), self.num_heads))
        return merged


def attend(qkv: Tensor, num_heads: int) -> Tensor:
    """Mixes [batch, sequence, 3 * all heads' width] to [batch, sequence, all heads' width]."""
    batch, sequence, width = qkv.shape
    q, k, v = qkv.view(batch, sequence, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).reshape(batch, sequence, width // 3)


class Block(nn.Module):
    """Attention and an MLP four times as wide, each behind its norm."""

    def __init__(self, config: GPTConfig, width: int = 0) -> None:
        """`width`: of its input, 0 for the model's."""
        super().__init__()
        width = width or config.width
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(config, width)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(Linear(width, 4 * width), nn.GELU(), Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Tokens [batch, sequence] (int64) to logits [batch, sequence, vocabulary]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = Linear(config.width, config.vocabulary)
        self._initialise()

    def _initialise(self) -> None:
        # GPT-2's scheme: what writes into the residual stream starts smaller, by the number of writers.
        residual = (2 * self.config.num_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                writes_residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.02 * (residual if writes_residual else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Towers(GPT):
    """Two towers, as pi0 has them: the second, of half the width, reads the last quarter of the tokens.

    Layer i of both is computed together: one attention over what both project. No block is ever called.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        half = config.width // 2
        self.into, self.back = nn.Linear(config.width, half), nn.Linear(half, config.width)
        self.others = nn.ModuleList(Block(config, half) for _ in range(config.num_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        both = self.tokens(tokens) + self.positions(positions)
        first = tokens.shape[1] * 3 // 4
        x, y = both[:, :first], self.into(both[:, first:])
        pairs: Any = zip(self.blocks, self.others, strict=True)
        for a, b in pairs:
            qkv = [block.attention.qkv(block.attention_norm(part)) for block, part in ((a, x), (b, y))]
            mixed = attend(torch.cat(qkv, 1), self.config.num_heads)
            x, y = x + a.attention.out(mixed[:, :first]), y + b.attention.out(mixed[:, first:])
            x, y = x + a.mlp(a.mlp_norm(x)), y + b.mlp(b.mlp_norm(y))
        logits: Tensor = self.head(self.norm(torch.cat([x, self.back(y)], 1)))
        return logits
