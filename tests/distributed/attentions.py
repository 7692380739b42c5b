"""Small models with attention of several kinds; their logits in full, and the clip of one process, head by head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from dmuon.attention import Heads
from models import VOCABULARY, loss_of
from reference import QUINTIC, ReferenceMuon

import dmuon

WIDTH, HEADS, DIM = 24, 4, 6
LR, WEIGHT_DECAY = 2e-2, 0.1


class Grouped(nn.Module):
    """Two query heads share a key. Queries have a bias that AdamW updates, keys have one that stays."""

    groups = 2

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, self.groups * DIM)
        self.v = nn.Linear(WIDTH, self.groups * DIM, bias=False)
        nn.init.normal_(self.k.bias)

    def operands(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [p(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in (self.q, self.k, self.v)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.scaled_dot_product_attention(*self.operands(x), is_causal=True, enable_gqa=True, scale=0.5)
        return out.transpose(1, 2).flatten(2)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        q, k, _ = self.operands(x)
        return torch.stack([q[:, h] @ k[:, h // 2].mT for h in range(HEADS)], 1) * 0.5

    def clip(self, gammas: list[float]) -> None:
        for group in range(self.groups):
            least = min(gammas[2 * group], gammas[2 * group + 1])
            for of in (self.k.weight, self.k.bias):
                of[group * DIM : (group + 1) * DIM] *= math.sqrt(least)
            for head in (2 * group, 2 * group + 1):
                for of in (self.q.weight, self.q.bias):
                    of[head * DIM : (head + 1) * DIM] *= gammas[head] / math.sqrt(least)


class Interleaved(nn.Module):
    """One projection; each head has its value, its key and its query in it. Logits go through a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.vkq = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = self.vkq(x).unflatten(-1, (HEADS, 3, DIM))[..., 0, :].transpose(1, 2)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1).to(x.device)
        probabilities = F.softmax(self.logits(x).masked_fill(hidden, -math.inf), dim=-1)
        return (probabilities @ v).transpose(1, 2).flatten(2)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        _, k, q = self.vkq(x).unflatten(-1, (HEADS, 3, DIM)).permute(3, 0, 2, 1, 4)
        return q @ k.mT / DIM**0.5

    def clip(self, gammas: list[float]) -> None:
        for head, gamma in enumerate(gammas):
            begin = head * 3 * DIM
            self.vkq.weight[begin + DIM : begin + 3 * DIM] *= math.sqrt(gamma)  # key, query


class Latent(nn.Module):
    """MLA: a head's query has two rows with positions, here none, whose key all heads share."""

    shared = 2

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 10 + self.shared, bias=False)
        self.q = nn.Linear(WIDTH, HEADS * (DIM + self.shared), bias=False)
        self.kv = nn.Linear(10, HEADS * 2 * DIM, bias=False)

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        latent, shared = self.down(x).split([10, self.shared], -1)
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(latent).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(2, -1)
        return q, torch.cat([k, shared[:, None].expand(-1, HEADS, -1, -1)], -1), v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return F.scaled_dot_product_attention(*self.operands(x), attn_mask=mask).transpose(1, 2).flatten(2)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        q, k, _ = self.operands(x)
        return q @ k.mT / (DIM + self.shared) ** 0.5

    def clip(self, gammas: list[float]) -> None:
        for head, gamma in enumerate(gammas):
            begin = head * (DIM + self.shared)
            self.q.weight[begin : begin + DIM] *= math.sqrt(gamma)
            self.q.weight[begin + DIM : begin + DIM + self.shared] *= gamma
            self.kv.weight[2 * head * DIM : (2 * head + 1) * DIM] *= math.sqrt(gamma)


class Torchs(nn.MultiheadAttention):
    """PyTorch's own attention has a causal mask here."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, bias=False, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        out, _ = super().forward(x, x, x, attn_mask=hidden, need_weights=False)
        return out

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (x @ w.T for w in self.in_proj_weight.split(WIDTH)[:2])
        q, k = (y.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for y in (q, k))
        return q @ k.mT / DIM**0.5

    def clip(self, gammas: list[float]) -> None:
        for head, gamma in enumerate(gammas):
            for begin in (head * DIM, WIDTH + head * DIM):
                self.in_proj_weight[begin : begin + DIM] *= math.sqrt(gamma)


KINDS: dict[str, type[nn.Module]] = {k.__name__.lower(): k for k in (Grouped, Interleaved, Latent, Torchs)}
HEADS_OF: dict[type[nn.Module], Callable[[nn.Module], Heads]] = {
    Grouped: lambda module: Heads(HEADS, DIM, Grouped.groups, query="q", key="k"),
    Interleaved: lambda module: Heads(
        HEADS,
        DIM,
        query="vkq",
        key="vkq",
        query_rows=range(2 * DIM, 3 * WIDTH, 3 * DIM),
        key_rows=range(DIM, 3 * WIDTH, 3 * DIM),
    ),
    Latent: lambda module: Heads(
        HEADS, DIM, query="q", key="kv.weight", key_rows=range(0, 2 * WIDTH, 2 * DIM), shared_dim=Latent.shared
    ),
}
dmuon.attention.by_class.update(HEADS_OF)


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.attention, self.out = nn.LayerNorm(WIDTH), KINDS[kind](), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.attention(self.norm(x)))


class Model(nn.Module):
    """Two blocks. `skip` leaves the second one out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.skip = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks[:1] if self.skip else self.blocks:
            x = block(x)
        return self.head(x)


def make_model(kind: str) -> Model:
    """Queries and keys are large, so that heads have logits of several sizes."""
    torch.manual_seed(0)
    model = Model(kind)
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.attention.parameters():
                parameter.mul_(torch.rand(len(parameter), *[1] * (parameter.ndim - 1)) * 5 + 0.5)
    return model


def of_adamw(model: nn.Module) -> list[dict[str, Any]]:
    """Biases of keys have no gradient but noise, which AdamW would make steps of."""
    biases = [p for name, p in model.named_parameters() if name.endswith("k.bias")]
    return [{"params": biases, "lr": 0.0, "weight_decay": 0.0}] if biases else []


class OneProcess:
    """Trains a plain model, computes all logits in full, and multiplies rows behind the optimizer's step."""

    def __init__(self, kind: str, tau: float | None = None) -> None:
        """`tau` None: in the middle of the first step's maxima, so that half of the heads are clipped."""
        self.model, self.tau = make_model(kind), tau
        names = [n for n, p in self.model.named_parameters() if p.ndim == 2 and "blocks" in n]
        self.opt = ReferenceMuon(self.model, names, LR, WEIGHT_DECAY, rows=QUINTIC)
        for group in self.opt.adamw.param_groups:
            group["params"] = [
                p for p in group["params"] if all(p is not q for g in of_adamw(self.model) for q in g["params"])
            ]
        self.maxima: dict[str, list[torch.Tensor]] = {}
        self.history: list[dict[str, torch.Tensor]] = []
        for name, module in self.model.named_modules():
            if type(module) in KINDS.values():
                self.maxima[name] = []
                module.register_forward_pre_hook(lambda module, args, name=name: self._see(name, module, args[0]))

    @torch.no_grad()
    def _see(self, name: str, module: Any, x: torch.Tensor) -> None:
        logits = module.logits(x)
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        self.maxima[name].append(logits.masked_fill(hidden, -math.inf).amax((0, 2, 3)))

    def backward(self, tokens: torch.Tensor, scale: float = 1.0) -> None:
        (loss_of(self.model, tokens) * scale).backward()

    @torch.no_grad()
    def step(self) -> None:
        self.opt.step()
        self.opt.zero_grad()
        none = torch.full((HEADS,), -math.inf)
        largest = {name: torch.stack([none, *seen]).amax(0) for name, seen in self.maxima.items()}
        self.history.append(largest)
        if self.tau is None:
            self.tau = float(torch.cat(list(largest.values())).sort().values[3:5].mean())
        for name, of_heads in largest.items():
            gammas = [self.tau / float(s) if s > self.tau else 1.0 for s in of_heads]
            self.model.get_submodule(name).clip(gammas)
            self.maxima[name].clear()
