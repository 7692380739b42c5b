"""The model of a program: small, smooth, and with everything that blocks of real models have."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn as nn
from program import Block, Program
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

INPUTS, WIDTH, HIDDEN = 6, 8, 12


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
    "empty": nn.Identity,
}
# Where a block's only matrix of WIDTH x WIDTH is.
SQUARE = {"linear": "weight", "biased": "weight", "parameter": "value"}


class Residual(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.body = BODIES[block.kind]()
        self.output, self.checkpoint = block.output, block.checkpoint

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: torch.Tensor) -> Any:
        if "reentrant" in self.checkpoint:
            change = checkpoint(self.compute, x, use_reentrant=self.checkpoint == "reentrant")
        else:
            change = self.compute(x)
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


class Net(nn.Module):
    """stem, blocks in the order that a forward is given, head; returns [batch, 2]."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(map(make_block, program.blocks))
        self.head = nn.Linear(WIDTH, 2)
        self.calls = [block.call for block in program.blocks]
        for index, block in enumerate(program.blocks):
            self._tie(index, block, program.blocks)
            self._freeze(self.blocks[index], block.frozen)
        if program.frozen_stem:
            self.stem.requires_grad_(False)

    def _tie(self, index: int, block: Block, blocks: tuple[Block, ...]) -> None:
        if is_tied(block, blocks):
            source = self.blocks[block.tied_to].body
            setattr(self.blocks[index].body, SQUARE[block.kind], getattr(source, SQUARE[blocks[block.tied_to].kind]))

    def _freeze(self, block: nn.Module, what: str) -> None:
        for parameter in block.parameters():
            if what in ("all", "matrices" if parameter.ndim == 2 else "others"):
                parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor, uses: tuple[int, ...]) -> torch.Tensor:
        x = self.stem(x)
        for index in uses:
            block = self.blocks[index]
            x = tensor_of(block(x=x) if self.calls[index] == "keyword" else block(x))
        return self.head(x)  # type: ignore[no-any-return]


def is_tied(block: Block, blocks: tuple[Block, ...]) -> bool:
    if block.tied_to < 0 or block.frozen or blocks[block.tied_to].frozen:  # which FSDP2 would manage, and refuses
        return False
    return block.kind in SQUARE and blocks[block.tied_to].kind in SQUARE


def make(program: Program, number: int = 0) -> Net:
    torch.manual_seed(number)
    net = Net(program)
    with torch.no_grad():  # what starts at zero or one hides what it multiplies
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def is_muons(name: str, parameter: torch.Tensor) -> bool:
    """A trainable weight of two dimensions that is not the output head."""
    return parameter.ndim == 2 and parameter.requires_grad and not name.startswith("head")


def select(name: str, module: nn.Module, parameter: nn.Parameter) -> bool | None:
    """Takes the matrices that the rule does not: those of `Matrix`, and single rows and columns."""
    extra = isinstance(module, Matrix) or (parameter.ndim == 2 and min(parameter.shape) == 1)
    return True if extra and is_muons(name, parameter) else None
