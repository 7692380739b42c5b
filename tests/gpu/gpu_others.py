"""Kernels of other projects, where they are installed: Dao-AILab's quack and gram-newton-schulz.

X-Square's package of the paper is not here: its module has the name of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dmuon import _C

if TYPE_CHECKING:
    from gpu_products import Product


@cache
def why_not() -> str:
    """The reason why there are none; empty if they work here."""
    try:
        newton_schulz()(torch.ones(1, 256, 512, device="cuda"))
    except Exception as error:  # they compile, and look for more than Python's packages
        return f"{type(error).__name__}: {error}"
    return ""


def product(of: Product, out: Tensor) -> Any:
    from quack.gemm_interface import gemm_symmetric  # type: ignore[import-not-found]

    return gemm_symmetric(of.a, of.b, C=of.c, alpha=of.alpha, beta=of.beta if of.c is not None else 1.0, out=out)


@cache
def newton_schulz() -> Callable[[Tensor], Tensor]:
    """Without torch.compile, which takes minutes for all shapes: then PyTorch works element by element."""
    from gram_newton_schulz import GramNewtonSchulz  # type: ignore[import-not-found]

    found: Callable[[Tensor], Tensor] = GramNewtonSchulz(
        ns_coefficients=_C.resolve_coefficients("polar_express", 5), compile_kwargs=None
    )
    return found
