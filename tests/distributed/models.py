"""Small models whose matrices have several shapes, odd ones among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

import dmuon

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


class Heads(nn.Linear):
    """Of a projection Muon takes every head of 8 rows by itself, so that heads may have several owners."""


dmuon.views.by_class[Heads] = {"weight": lambda parameter: dmuon.views.per_head(parameter, 8)}


class Experts(nn.Module):
    """A layer of the mean of three, of which Muon takes each by itself."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, outputs, inputs) / inputs**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("eoi,bti->bto", self.stack, x) / 3


class Matrices(nn.Module):
    """Nothing but a matrix a block: `sizes[i + 1]` x `sizes[i]`."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(sizes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Skips(nn.Module):
    """`blocks` hold nothing but a matrix each; ranks may skip them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(10, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(4))
        self.head = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor, skip: tuple[int, ...] = ()) -> torch.Tensor:
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            if i not in skip:
                x = x + torch.tanh(block(x))
        return self.head(x)


def make_gpt(seed: int = 0, **sizes: int) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(**sizes)


def heads_gpt(depth: int = 2) -> Gpt:
    """Q, K and V are 9 heads."""
    model = make_gpt(depth=depth)
    for block in model.blocks:
        block.qkv = Heads(24, 72, bias=False)
    return model


def experts_gpt(depth: int = 2) -> Gpt:
    model = heads_gpt(depth)
    for block in model.blocks:
        block.down = Experts(41, 24)
    return model


def batch(step: int, size: int = 12, length: int = 7) -> torch.Tensor:
    """[size, length + 1] tokens of a global batch; 12 divides by 1, 2, 3 and 4 ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (size, length + 1), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def square_loss(step: int, skips: dict[int, tuple[int, ...]] | None = None) -> Callable[[nn.Module, int], torch.Tensor]:
    """Of a model with ten inputs, on what each rank draws; `skips[rank]`: the blocks that the rank leaves out."""

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        x = torch.randn(5, 10, generator=torch.Generator().manual_seed(100 * step + rank))
        output = model(x) if skips is None else model(x, skips.get(rank, ()))
        return (output - x.sum(-1, keepdim=True).sin()).square().mean()

    return loss


def part(tokens: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tokens.chunk(size)[rank]


def is_matrix_of_a_block(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and "blocks" in name


def weights_of_plain(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every weight of a model on one process."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
