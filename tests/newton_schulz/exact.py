"""Independent references: the exact polynomial on a constructed SVD, and torch.optim.Muon's iteration."""

from __future__ import annotations

import math
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
