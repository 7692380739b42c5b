"""A small Llama under tensor parallelism, and its training on ranks and on one process."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from reference import ReferenceMuon
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from training import LR, WEIGHT_DECAY, dedicate

import dmuon

Weights = dict[str, torch.Tensor]
VOCABULARY, LENGTH, BATCH = 48, 24, 8  # the length is a multiple of 2, 3 and 4


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv: int, bias: bool) -> None:
        super().__init__()
        self.head = dim // heads
        self.wq = nn.Linear(dim, heads * self.head, bias=bias)
        self.wk = nn.Linear(dim, kv * self.head, bias=bias)
        self.wv = nn.Linear(dim, kv * self.head, bias=bias)
        self.wo = nn.Linear(heads * self.head, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        repeats = q.shape[1] // k.shape[1]
        k, v = (kv.repeat_interleave(repeats, 1) for kv in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """`gate`: a matrix that tensor parallelism leaves whole, on a plain parameter."""

    def __init__(self, dim: int, heads: int, kv: int, hidden: int, bias: bool, gate: bool) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, kv, bias)
        self.feed_forward = FeedForward(dim, hidden)
        self.attention_norm = nn.RMSNorm(dim)
        self.ffn_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, dim, bias=False) if gate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        if self.gate is not None:
            x = x + self.gate(x)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(
        self,
        dim: int = 24,
        heads: int = 12,
        kv: int = 12,
        hidden: int = 48,
        layers: int = 2,
        bias: bool = False,
        gate: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv, hidden, bias, gate) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def is_matrix(name: str) -> bool:
    return name.startswith("blocks") and name.endswith("weight") and "norm" not in name


def parallelize(model: Llama, mesh: DeviceMesh, sequence: bool = True, loss_parallel: bool = False) -> None:
    """As torchtitan does it; `sequence`: activations between blocks are divided along the sequence."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        plan = {f"attention.{w}": ColwiseParallel(input_layouts=between) for w in ("wq", "wk", "wv")}
        plan |= {f"feed_forward.{w}": ColwiseParallel(input_layouts=between) for w in ("w1", "w3")}
        plan |= {w: RowwiseParallel(output_layouts=between) for w in ("attention.wo", "feed_forward.w2")}
        if sequence:
            plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        parallelize_module(block, mesh, plan)


@functools.cache
def meshes(dims: tuple[int, ...], device_type: str) -> tuple[DeviceMesh, DeviceMesh | None]:
    """(data-parallel mesh, that of tensor parallelism), which is the last of `dims` if there are several."""
    if len(dims) == 1:
        return (init_device_mesh(device_type, dims, mesh_dim_names=("shard",)), None)
    names = ("replicate", "shard", "tensor")[-len(dims) :]
    mesh = init_device_mesh(device_type, dims, mesh_dim_names=names)
    return mesh[names[:-1]] if len(dims) > 2 else mesh[names[0]], mesh["tensor"]


def tokens(step: int, part: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + micro)
    drawn = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch)
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


def make_model(seed: int = 0, **sizes: Any) -> Llama:
    torch.manual_seed(seed)
    return Llama(**sizes)


def _trained(model: Llama, parts: int, steps: int, micros: int, max_norm: float) -> Weights:
    optimizer = ReferenceMuon(model, [n for n, _ in model.named_parameters() if is_matrix(n)], LR, WEIGHT_DECAY)
    for step in range(steps):
        for part in range(parts):
            for micro in range(micros):
                (loss_of(model, tokens(step, part, micro)) / parts / micros).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained_alone(
    model: Llama, parts: int, steps: int, micros: int = 1, max_norm: float = 0.0
) -> tuple[Weights, Weights, dict[str, float]]:
    """Trains on one process; `parts` is the number of data ranks.

    Returns the weights before the first step and after the last, in fp64, and the largest error of each that may be:
    1e-5 of the way moved, or twice the error of one process in fp32, where that is more.
    """
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    exact = _trained(copy.deepcopy(model).double(), parts, steps, micros, max_norm)
    rounded = _trained(copy.deepcopy(model), parts, steps, micros, max_norm)
    return before, exact, {name: max(1e-5, 2 * error) for name, error in errors(before, exact, rounded).items()}


class OnRanks:
    """The same on ranks: of a mesh of `dims`, of which the last is tensor parallelism's."""

    def __init__(
        self,
        device_type: str,
        dims: tuple[int, ...],
        sequence: bool = True,
        prepare: Callable[[Llama], None] = lambda model: None,
        shards: bool = True,
        shards_first: bool = False,
        fsdp: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        muon: dict[str, Any] | None = None,
        **sizes: Any,
    ) -> None:
        self.data, self.tensor = meshes(dims, device_type)
        self.parts = math.prod(dims[:-1]) if self.tensor is not None else dims[0]
        self.part = self.data.mesh.flatten().tolist().index(dist.get_rank())
        self._fsdp = fsdp or {}
        self.model = make_model(**sizes)
        if self.tensor is not None:
            parallelize(self.model, self.tensor, sequence)
        prepare(self.model)
        if shards_first:
            self.shard()
        dedicate(self.model, self.data, options or {})
        if shards and not shards_first:
            self.shard()
        self.optimizer = dmuon.Muon(
            self.model, lr=LR, weight_decay=WEIGHT_DECAY, **{"ns_dtype": torch.float32, **(muon or {})}
        )

    def shard(self) -> None:
        for block in self.model.blocks:
            fully_shard(block, mesh=self.data, **self._fsdp)
        fully_shard(self.model, mesh=self.data, **self._fsdp)

    def run(self, steps: int, micros: int = 1, clip: Callable[[nn.Module], Any] | None = None, first: int = 0) -> None:
        for step in range(first, first + steps):
            for micro in range(micros):
                with dmuon.no_sync(self.model) if micro + 1 < micros else nullcontext():
                    (loss_of(self.model, tokens(step, self.part, micro)) / micros).backward()
            if clip is not None:
                clip(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def saved(self) -> dict[str, torch.Tensor]:
        """Whole weights, from the state dict, by their names without wrappers."""
        return {
            name.replace("_checkpoint_wrapped_module.", ""): whole(v) for name, v in self.model.state_dict().items()
        }


def whole(tensor: Any) -> torch.Tensor:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


def errors(before: Weights, expected: Weights, got: Weights) -> dict[str, float]:
    """The distance of each weight from the expected one, by the way that one has moved."""
    assert expected.keys() == got.keys()
    moved = {name: (weight - before[name]).norm().clamp(min=1e-12) for name, weight in expected.items()}
    return {name: float((got[name] - weight).norm() / moved[name]) for name, weight in expected.items()}


def worst_error(before: Weights, expected: Weights, got: Weights) -> float:
    return max(errors(before, expected, got).values())


def too_far(before: Weights, expected: Weights, got: Weights, most: dict[str, float]) -> dict[str, float]:
    """The errors that are larger than they may be."""
    return {name: error for name, error in errors(before, expected, got).items() if error > most[name]}
