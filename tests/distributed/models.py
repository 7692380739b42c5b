"""Small models whose matrices have several shapes, odd ones among them."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY = 29


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a key bias has no gradient but noise
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    def __init__(self, width: int = 24, hidden: int = 41, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt(seed: int = 0, **sizes: int) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(**sizes)


def batch(step: int, size: int = 12, length: int = 7) -> torch.Tensor:
    """[size, length + 1] tokens of a global batch; 12 divides by 1, 2, 3 and 4 ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (size, length + 1), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def part(tokens: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tokens.chunk(size)[rank]


def is_matrix_of_a_block(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and "blocks" in name


def weights_of_plain(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every weight of a model on one process."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
