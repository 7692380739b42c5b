"""The model of a program: small, smooth, and with everything that blocks of real models have."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from program import Block, Program
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import dmuon

INPUTS, WIDTH, HIDDEN = 6, 8, 12
MOST = 0.4  # of what a block bounds that changes its matrix
ROUTES = 4  # that a row may take, see `route_of`


@dataclasses.dataclass
class Output:
    x: torch.Tensor
    more: torch.Tensor


class Matrix(nn.Module):
    def __init__(self, rows: int, cols: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(rows, cols) / cols**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.value.T


class Nested(nn.Module):
    """Units inside a unit, used in another order than they stand in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)])
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner[1](x)) + self.shift
        return self.mix(torch.tanh(self.inner[0](x)))


class Fused(nn.Module):
    """A projection to several parts, the first of which is multiplied by the last."""

    def __init__(self, rows: int, bias: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, rows, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.into(x)
        return parts[:, :WIDTH] * (1 + parts[:, -WIDTH:].sin())  # type: ignore[no-any-return]


class Conv(nn.Module):
    """As wide as its input."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(WIDTH, 2, WIDTH // 2) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("oik,bik->bo", self.kernel, x.view(-1, 2, WIDTH // 2))


class Stack(nn.Module):
    """An expert a route, and one more that no row ever reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(ROUTES + 1, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        return torch.einsum("eoi,bi,be->bo", self.experts, x, reached(route, ROUTES + 1, x))


class Experts(nn.Module):
    """Two stacks of six experts, two of which no row ever reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(ROUTES + 2, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(ROUTES + 2, WIDTH, HIDDEN // 2) / HIDDEN**0.5)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("ehi,bi->beh", self.up, x).chunk(2, -1)
        return torch.einsum("eoh,beh,be->bo", self.down, torch.tanh(gate) * up, reached(route, ROUTES + 2, x))


class Stored(nn.Module):
    """Weights as [in, out]: a stack of six experts, each of two parts side by side, and the way back to WIDTH."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(ROUTES + 2, WIDTH, HIDDEN) / WIDTH**0.5)
        self.back = nn.Parameter(torch.randn(HIDDEN // 2, WIDTH) / HIDDEN**0.5)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("eih,bi,be->bh", self.up, x, reached(route, ROUTES + 2, x)).chunk(2, -1)
        return (torch.tanh(gate) * up) @ self.back


def reached(route: torch.Tensor, num_experts: int, like: torch.Tensor) -> torch.Tensor:
    """[batch, experts]: 1 where a row takes the expert. What is multiplied by 0 has a gradient of zeros."""
    return (route[:, None] == torch.arange(num_experts, device=route.device)).to(like.dtype)


def linear(rows: int, cols: int, bias: bool = False) -> nn.Module:
    return nn.Linear(cols, rows, bias=bias)


BODIES: dict[str, Any] = {
    "linear": lambda: linear(WIDTH, WIDTH),
    "biased": lambda: linear(WIDTH, WIDTH, bias=True),
    "mlp": lambda: nn.Sequential(
        nn.LayerNorm(WIDTH), linear(HIDDEN, WIDTH, bias=True), nn.Tanh(), linear(WIDTH, HIDDEN)
    ),
    "thin": lambda: nn.Sequential(linear(2, WIDTH), linear(WIDTH, 2)),
    "column": lambda: nn.Sequential(linear(1, WIDTH), linear(WIDTH, 1)),
    "parameter": lambda: Matrix(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "nested": Nested,
    "heads": lambda: linear(WIDTH, WIDTH),
    "qkv": lambda: Fused(2 * WIDTH),
    "rows": lambda: Fused(WIDTH + 1),
    "gated": lambda: Fused(2 * WIDTH, bias=True),
    "conv": Conv,
    "stack": Stack,
    "experts": Experts,
    "beside": lambda: linear(WIDTH, WIDTH),
    "stored": Stored,
    "empty": nn.Identity,
}
TAKE_ROUTES = (Stack, Experts, Stored)
# A block's matrix that blocks may share: its shape's name, and where it is. What it consists of, the first block says.
SHARED = {
    "linear": ("square", "weight"),
    "biased": ("square", "weight"),
    "parameter": ("square", "value"),
    "heads": ("square", "weight"),
    "beside": ("square", "weight"),
    "stack": ("stack", "experts"),
    "conv": ("conv", "kernel"),
}


@dataclasses.dataclass(frozen=True)
class Several:
    """Of a parameter that consists of several matrices: what dmuon is told, and which they are."""

    view: Callable[[torch.Tensor], Any] | None  # None: dmuon's default rule says it
    cut: Callable[[torch.Tensor], list[torch.Tensor]]


def in_out(parameter: torch.Tensor) -> dmuon.View:
    return dmuon.views.transposed(dmuon.views.columns(parameter, 2))


SEVERAL = {
    ("heads", "weight"): Several(lambda p: dmuon.views.per_head(p, 2), lambda p: [p[i : i + 2] for i in (0, 2, 4, 6)]),
    ("qkv", "into.weight"): Several(lambda p: dmuon.views.qkv(p, 2, 1), lambda p: [p[:8], p[8:12], p[12:]]),
    ("rows", "into.weight"): Several(lambda p: dmuon.views.rows(p, [5, 1, 3]), lambda p: [p[:5], p[5:6], p[6:]]),
    ("gated", "into.weight"): Several(dmuon.views.gate_up, lambda p: [p[:8], p[8:]]),
    ("conv", "kernel"): Several(dmuon.views.conv, lambda p: [p.view(8, 8)]),
    ("stack", "experts"): Several(dmuon.views.experts, lambda p: list(p)),
    ("experts", "up"): Several(dmuon.views.gate_up, lambda p: [half for e in p for half in (e[:6], e[6:])]),
    ("experts", "down"): Several(None, lambda p: list(p)),
    ("beside", "weight"): Several(lambda p: dmuon.views.columns(p, 2), lambda p: [p[:, :4], p[:, 4:]]),
    ("stored", "up"): Several(in_out, lambda p: [half.T for e in p for half in (e[:, :6], e[:, 6:])]),
    ("stored", "back"): Several(in_out, lambda p: [p[:, :4].T, p[:, 4:].T]),
}


class Residual(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.body = BODIES[block.kind]()
        self.output, self.checkpoint = block.output, block.checkpoint
        self.changes, self.matrix = block.changes, SHARED.get(block.kind, ("", ""))[1]

    @torch.no_grad()
    def change(self) -> None:
        """Bounds the matrix. Where nothing is to do it does nothing, because a graph may have the matrix already."""
        matrix = getattr(self.body, self.matrix)
        if not bool((matrix.abs() > MOST).any()):
            return
        if self.changes == "in place":
            matrix.clamp_(-MOST, MOST)
        else:
            matrix.data = matrix.data.clamp(-MOST, MOST)

    def compute(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        if self.changes:
            self.change()
        return torch.tanh(self.body(x, route) if isinstance(self.body, TAKE_ROUTES) else self.body(x))

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> Any:
        return self.whole(x, route)

    def whole(self, x: torch.Tensor, route: torch.Tensor) -> Any:
        if "reentrant" in self.checkpoint:
            change = checkpoint(self.compute, x, route, use_reentrant=self.checkpoint == "reentrant")
        else:
            change = self.compute(x, route)
        x, more = x + 0.5 * change, change.square()
        if self.output == "tensor":
            return x
        if self.output == "tuple":
            return x, [more]
        return {"x": x, "more": {"most": more}} if self.output == "dict" else Output(x, more)


def make_block(block: Block) -> nn.Module:
    return checkpoint_wrapper(Residual(block)) if block.checkpoint == "wrapped" else Residual(block)


def tensor_of(output: Any) -> torch.Tensor:
    """Of all that a block returns, so that each tensor of it has a gradient."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple):
        return output[0] + 0.1 * output[1][0]  # type: ignore[no-any-return]
    if isinstance(output, dict):
        return output["x"] + 0.1 * output["more"]["most"]  # type: ignore[no-any-return]
    return output.x + 0.1 * output.more  # type: ignore[no-any-return]


def route_of(x: torch.Tensor) -> torch.Tensor:
    """[batch] in [0, ROUTES): by two signs of a row, which every precision has alike."""
    return 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


class Net(nn.Module):
    """stem, blocks in the order that a forward is given, head; returns [batch, 2]."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(map(make_block, program.blocks))
        self.head = nn.Linear(WIDTH, 2)
        self.calls = [block.call for block in program.blocks]
        self.reads = [block.reads for block in program.blocks]
        for index, block in enumerate(program.blocks):
            self._tie(index, block, program.blocks)
            self._freeze(self.blocks[index], block.frozen)
        if program.frozen_stem:
            self.stem.requires_grad_(False)

    def _tie(self, index: int, block: Block, blocks: tuple[Block, ...]) -> None:
        if is_tied(block, blocks):
            source = self.blocks[block.tied_to].body
            shared = getattr(source, SHARED[blocks[block.tied_to].kind][1])
            setattr(self.blocks[index].body, SHARED[block.kind][1], shared)

    def _freeze(self, block: nn.Module, what: str) -> None:
        for parameter in block.parameters():
            if what in ("all", "matrices" if parameter.ndim >= 2 else "others"):
                parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor, uses: tuple[int, ...]) -> torch.Tensor:
        route, x = route_of(x), self.stem(x)
        for index in uses:
            block = self.blocks[index]
            if self.reads[index]:
                x = tensor_of(block.whole(x, route))
            else:
                x = tensor_of(block(x=x, route=route) if self.calls[index] == "keyword" else block(x, route))
        return self.head(x)  # type: ignore[no-any-return]


def is_tied(block: Block, blocks: tuple[Block, ...]) -> bool:
    if block.tied_to < 0 or block.frozen or blocks[block.tied_to].frozen:  # which FSDP2 would manage, and refuses
        return False
    shapes = [SHARED.get(kind, (kind, ""))[0] for kind in (block.kind, blocks[block.tied_to].kind)]
    return block.kind in SHARED and shapes[0] == shapes[1]


def make(program: Program, number: int = 0) -> Net:
    torch.manual_seed(number)
    net = Net(program)
    with torch.no_grad():  # what starts at zero or one hides what it multiplies
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def is_muons(name: str, parameter: torch.Tensor) -> bool:
    """A trainable weight of two dimensions or more that is not the output head."""
    return parameter.ndim >= 2 and parameter.requires_grad and not name.startswith("head")


def grouped(net: Net, program: Program) -> dict[str, nn.Parameter]:
    """The matrices that have a rate of their own, by name."""
    blocks = tuple(f"blocks.{index}." for index in program.grouped)
    return {n: p for n, p in net.named_parameters() if n.startswith(blocks) and is_muons(n, p)}


def inputs_of(net: Net, program: Program, uses: tuple[int, ...]) -> list[torch.Tensor]:
    """The matrices of the first block of `uses` that has some which need a gradient."""
    for index in uses:
        found = [p for n, p in net.named_parameters() if n.startswith(f"blocks.{index}.") and is_muons(n, p)]
        if found:
            return found
    return []


def several_of(program: Program, name: str) -> Several | None:
    """What there is to know of a parameter, by its name; None of what is one matrix, or none."""
    found = re.fullmatch(r"blocks\.(\d+)\.(?:_checkpoint_wrapped_module\.)?body\.(.+)", name)
    return SEVERAL.get((program.blocks[int(found[1])].kind, found[2])) if found else None


def selecting(program: Program) -> Callable[[str, nn.Module, nn.Parameter], Any]:
    """Takes the matrices that the rule does not: those of `Matrix`, single rows and columns, and what has several."""

    def select(name: str, module: nn.Module, parameter: nn.Parameter) -> Any:
        several = several_of(program, name)
        if several and several.view and parameter.requires_grad:
            return several.view(parameter)
        extra = isinstance(module, Matrix) or (parameter.ndim == 2 and min(parameter.shape) == 1)
        return True if extra and is_muons(name, parameter) else None

    return select
