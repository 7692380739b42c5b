"""Independent references: the exact polynomial on a constructed SVD, and torch.optim.Muon's iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

QUINTIC = [(3.4445, -4.7750, 2.0315)] * 5


def has_kernels(dtype: torch.dtype) -> bool:
    """What the system says of the processor."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    needed = {"avx512f", "avx512bw", "avx512dq", "avx512vl", *(["avx512_bf16"] if dtype == torch.bfloat16 else [])}
    return dtype in (torch.float32, torch.bfloat16) and needed <= flags


@dataclass
class Constructed:
    """x = u diag(s) v' in fp64, with its factors known."""

    u: Tensor
    s: Tensor
    v: Tensor

    @property
    def x(self) -> Tensor:
        return (self.u * self.s) @ self.v.T

    def polynomial(self, rows: list[tuple[float, float, float]]) -> Tensor:
        """What exact arithmetic gives after one step a row."""
        s = self.s / self.s.norm()
        for a, b, c in rows:
            s = a * s + b * s**3 + c * s**5
        return (self.u * s) @ self.v.T


def with_singular_values(rows: int, cols: int, s: Tensor, seed: int = 0) -> Constructed:
    g = torch.Generator().manual_seed(seed)
    u = torch.linalg.qr(torch.randn(rows, len(s), dtype=torch.float64, generator=g)).Q
    v = torch.linalg.qr(torch.randn(cols, len(s), dtype=torch.float64, generator=g)).Q
    return Constructed(u, s, v)


def gaussian(rows: int, cols: int, seed: int = 0) -> Constructed:
    g = torch.Generator().manual_seed(seed)
    u, s, vt = torch.linalg.svd(torch.randn(rows, cols, dtype=torch.float64, generator=g), full_matrices=False)
    return Constructed(u, s, vt.T)


def conditioned(rows: int, cols: int, condition: float, seed: int = 0) -> Constructed:
    """Singular values equally spaced in the logarithm, from 1 down to 1/condition."""
    s = torch.logspace(0, -math.log10(condition), min(rows, cols), dtype=torch.float64)
    return with_singular_values(rows, cols, s, seed)


def constructed(shape: tuple[int, int], seed: int = 0) -> dict[str, Callable[[], Tensor]]:
    """Matrices by their singular values: Gaussian ones, conditions up to 1e7, two large values."""

    def with_two() -> Tensor:
        s = torch.logspace(-2, -4, min(shape) - 2, dtype=torch.float64)
        return with_singular_values(*shape, torch.cat([torch.ones(2, dtype=torch.float64), s]), seed).x

    makers: dict[str, Callable[[], Tensor]] = {"gaussian": lambda: normal(seed, *shape).double()}
    for condition in (10, 20, 30, 50, 1e3, 1e7):
        makers[f"condition {condition:g}"] = lambda condition=condition: conditioned(*shape, condition, seed).x
    return {**makers, "two large values": with_two}


def normal(seed: int, *sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def of_networks(shape: tuple[int, int], seed: int = 0) -> dict[str, Callable[[], Tensor]]:
    """Rows or columns that fall off; a few directions with most of the norm's square; a mean; a layer's gradient."""
    rows, cols = shape
    first = 10 * seed + 3

    def dominated(rank: int, share: float) -> Tensor:
        few, rest = normal(first, rows, rank) @ normal(first + 1, rank, cols), normal(first + 2, *shape)
        return share**0.5 * few / few.norm() + (1 - share) ** 0.5 * rest / rest.norm()

    def gradient() -> Tensor:
        inputs = normal(first, 256, cols) + 1
        outputs = (inputs @ (normal(first + 1, cols, rows) / cols**0.5)).relu()
        return outputs.T @ inputs / 256

    makers: dict[str, Callable[[], Tensor]] = {}
    for fall in (1, 2, 3):
        makers[f"rows fall {fall}"] = lambda fall=fall: normal(first, *shape) * torch.logspace(0, -fall, rows)[:, None]
        makers[f"columns fall {fall}"] = lambda fall=fall: normal(first, *shape) * torch.logspace(0, -fall, cols)
    for rank, share in [*((1, s) for s in (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.99, 0.999, 0.9999)), (3, 0.75)]:
        makers[f"{rank} of {share}"] = lambda rank=rank, share=share: dominated(rank, share)
    for factor in (3, 30):
        scales = torch.cat([torch.tensor([float(factor)]), torch.ones(max(shape) - 1)])
        makers[f"a row times {factor}"] = lambda scales=scales: normal(first, *shape) * scales[:rows, None]
        makers[f"a column times {factor}"] = lambda scales=scales: normal(first, *shape) * scales[:cols]
    return {**makers, "mean 1": lambda: normal(first, *shape) + 1, "a layer's gradient": gradient}


def hard_spectra(size):
    yield torch.logspace(0, -7, size, dtype=torch.float64)
    yield torch.cat([torch.ones(10, dtype=torch.float64), torch.zeros(size - 10, dtype=torch.float64)])
    yield torch.cat([torch.ones(2, dtype=torch.float64), torch.logspace(-4, -7, size - 2, dtype=torch.float64)])


def relative_error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def textbook(x: Tensor, rows: list[tuple[float, float, float]], dtype: torch.dtype) -> Tensor:
    """torch.optim.Muon's arithmetic in any dtype: every product in fp32 or wider, rounded once to dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tall = x.shape[-2] > x.shape[-1]
    y = x.to(dtype).mT if tall else x.to(dtype)
    y = (y.to(wide) / y.to(wide).norm()).to(dtype)
    for a, b, c in rows:
        w = y.to(wide)
        r = (w @ w.mT).to(dtype).to(wide)
        z = (b * r + c * (r @ r)).to(dtype).to(wide)
        y = (a * w + z @ w).to(dtype)
    return y.mT if tall else y


def rounding_bound(rows: list[tuple[float, float, float]], dtype: torch.dtype) -> float:
    """Relative error that rounding alone explains.

    fp64 and fp32: small singular values grow by the polynomial's slope at 0, the product of the a's,
    and so do their roundings: of X and of R, in each of two segments. 16 bits: that would exceed 1 and
    say nothing, but a Gaussian matrix's error sits at its large singular values, where the slope stays
    below 30.
    """
    unit = torch.finfo(dtype).eps / 2
    if dtype in (torch.bfloat16, torch.float16):
        return 30 * unit
    return 4 * unit * math.prod(a for a, _, _ in rows)
