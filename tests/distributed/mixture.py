"""A model whose weights are matrices in one parameter: experts, fused projections, heads, a convolution."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

import dmuon

WIDTH, HIDDEN, EXPERTS, HEADS, INNER = 12, 10, 3, 4, 6


class Experts(nn.Module):
    """All of them see every token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down_bias = nn.Parameter(torch.zeros(EXPERTS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("ehw,bw->ebh", self.gate_up, x).chunk(2, -1)
        return (torch.einsum("ewh,ebh->ebw", self.down, F.silu(gate) * up) + self.down_bias[:, None]).mean(0)


class Convolution(nn.Conv1d):
    # PyTorch has no convolution for the emulated device.
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None
        windows = F.pad(x, (1, 1)).unfold(-1, 3, 1)
        return torch.einsum("oik,biwk->bow", self.weight, windows) + self.bias[:, None]


class Stored(nn.Module):
    """Weights as GPT-2 and Llama 4 store them, [in, out]; Q, K and V, gate and up are blocks of columns."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(WIDTH, 3 * INNER) / 4)
        self.back = nn.Parameter(torch.randn(INNER, WIDTH) / 4)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.qkv).chunk(3, -1)
        gate, up = torch.einsum("bw,ewh->ebh", x, self.gate_up).chunk(2, -1)
        return torch.tanh(q * k + v + (F.silu(gate) * up).mean(0)) @ self.back


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(WIDTH, WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * (WIDTH // HEADS), bias=False)  # heads of Q share one of K and V
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.conv = Convolution(2, 3, 3, padding=1)
        self.experts = Experts()
        self.stored = Stored()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, *kv = self.qkv(F.normalize(x, dim=-1)).split([WIDTH, WIDTH // HEADS, WIDTH // HEADS], -1)
        k, v = (part.repeat(1, HEADS) for part in kv)
        x = x + torch.tanh(self.heads(q * k + v))
        gate, up = self.gate_up(x).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        x = x + self.conv(x.view(-1, 2, WIDTH // 2)).mean(1).repeat(1, 2)
        x = x + self.stored(F.normalize(x, dim=-1))
        return x + self.experts(x)


class Blocks(nn.Module):
    """Three of a kind, one after the other."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make_mixture() -> Blocks:
    torch.manual_seed(0)
    return Blocks(Block)


def select(name: str, module: nn.Module, parameter: nn.Parameter) -> dmuon.View | tuple[dmuon.View, ...] | None:
    kind, transposed = name.partition(".")[2].partition(".")[2], dmuon.views.transposed
    return {
        "heads.weight": lambda: dmuon.views.per_head(parameter, WIDTH // HEADS),
        "qkv.weight": lambda: dmuon.views.qkv(parameter, 4, 1),
        "gate_up.weight": lambda: dmuon.views.gate_up(parameter),
        "experts.gate_up": lambda: dmuon.views.gate_up(parameter),
        "conv.weight": lambda: dmuon.views.conv(parameter),
        "stored.qkv": lambda: transposed(dmuon.views.columns(parameter, 3)),
        "stored.back": lambda: transposed(dmuon.views.matrix(parameter)),
        "stored.gate_up": lambda: transposed(dmuon.views.columns(parameter, 2)),
    }.get(kind, lambda: None)()


# The matrices of each kind of weight, as indices say it; what is not here is AdamW's.
MATRICES: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "heads.weight": lambda p: [p[0:3], p[3:6], p[6:9], p[9:12]],
    "qkv.weight": lambda p: [p[0:12], p[12:15], p[15:18]],
    "gate_up.weight": lambda p: [p[0:10], p[10:20]],
    "down.weight": lambda p: [p],
    "conv.weight": lambda p: [torch.stack([p[:, i, j] for i in range(2) for j in range(3)], dim=1)],
    "experts.gate_up": lambda p: [p[0, :10], p[0, 10:], p[1, :10], p[1, 10:], p[2, :10], p[2, 10:]],
    "experts.down": lambda p: [p[0], p[1], p[2]],
    "stored.qkv": lambda p: [p[:, :6].T, p[:, 6:12].T, p[:, 12:].T],
    "stored.back": lambda p: [p.T],
    "stored.gate_up": lambda p: [p[e, :, half].T for e in range(EXPERTS) for half in (slice(6), slice(6, 12))],
}


def matrices_of(name: str) -> Callable[[torch.Tensor], list[torch.Tensor]] | None:
    return MATRICES.get(name.partition(".")[2].partition(".")[2])
