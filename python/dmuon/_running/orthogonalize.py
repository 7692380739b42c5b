"""Newton-Schulz orthogonalisation of one matrix or a batch of matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon import _C
from dmuon._setup.hyperparameters import NS_COEFFICIENTS, NS_STEPS, resolved_coefficients

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def orthogonalize(
    x: Tensor,
    *,
    ns_coefficients: str | Sequence[Sequence[float]] = NS_COEFFICIENTS,
    ns_steps: int = NS_STEPS,
    ns_dtype: torch.dtype | None = None,
) -> Tensor:
    """Moves the singular values of every matrix of `x` towards 1. Its singular vectors do not change.

    Starts from X = x / ||x||_F and sets X <- a X + (b X X' + c (X X')^2) X once a step. With the default set and five
    steps, singular values above 1.2e-3 of the Frobenius norm land in [0.83, 1.14]. The result does not depend on the
    scale of `x`. A zero matrix stays zero; one with a NaN or an infinity becomes NaN. Shape, dtype and coefficients
    decide the form of the iteration.

    Args:
        x: [..., m, n] in fp64, fp32, bf16 or fp16, on any device. Does not change. Without autograd.
        ns_coefficients: "polar_express" (arXiv 2505.16932), "quintic" (Keller Jordan, the set of torch.optim.Muon),
            "you" (YouJiacheng), "cans" (arXiv 2506.10935), "deepseekv4" (ten steps), "cubic5" (arXiv 2606.00371, five
            steps), or rows (a, b, c). Steps past the last row repeat it. A polynomial that diverges above
            1 needs a margin in 16 bits, which the rows of "polar_express" have (docs/options.md).
        ns_steps: number of steps, in [0, 99].
        ns_dtype: dtype of the iteration and the result. None means fp16 on GPUs; on CPUs bf16 if the processor
            multiplies it faster than fp32, else fp32.

    Returns:
        A new tensor with `x`'s shape, in `ns_dtype`.

    Raises:
        ValueError: an argument is outside the ranges above.
    """
    if not isinstance(x, Tensor):
        raise ValueError(f"orthogonalize: x must be a tensor; got {type(x).__name__}")
    if x.ndim < 2:
        raise ValueError(f"orthogonalize: x must be [..., m, n]; got shape {tuple(x.shape)}")
    if x.dtype not in _DTYPES:
        raise ValueError(f"orthogonalize: x must be fp64, fp32, bf16 or fp16; got {x.dtype}")
    if ns_dtype is not None and ns_dtype not in _DTYPES:
        raise ValueError(f"orthogonalize: ns_dtype must be fp64, fp32, bf16, fp16 or None; got {ns_dtype}")
    if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or not 0 <= ns_steps < 100:
        raise ValueError(f"orthogonalize: ns_steps must be an int in [0, 99]; got {ns_steps!r}")
    rows = resolved_coefficients(ns_coefficients, ns_steps, "orthogonalize")
    return _C.orthogonalize(x, rows, ns_steps, 0.0, ns_dtype)
