"""A small GPT on bytes: pre-norm blocks, learned positions, an untied head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class GPTConfig:
    """Sizes; `width` is a multiple of `num_heads`, `sequence` the longest input in tokens."""

    num_layers: int = 4
    width: int = 384
    num_heads: int = 6
    sequence: int = 64


class Attention(nn.Module):
    """Causal self-attention: input and output are [batch, sequence, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        heads = self.qkv(x).view(batch, sequence, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        return merged


class Block(nn.Module):
    """Attention and an MLP four times as wide, each behind its norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Tokens [batch, sequence] (int64) to logits [batch, sequence, 256]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
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
