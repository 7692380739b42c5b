"""Matrices that all ranks of tensor parallelism have: their copies stay equal only if their gradients are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dmuon import _C
from dmuon._setup.leaf import Leaf
from dmuon._setup.ranks import Ranks

# Of the squared norms. Kernels that add in any order give other bits; other tokens give other norms.
_TOLERANCE = 0.02
_NOISE = 1e-9  # of the whole gradient's: a smaller norm may be rounding alone


class Copies:
    """Compares the norms of the gradients that the ranks of a slot have for one matrix. Sends nothing.

    Ranks that compute a matrix's gradient from different tokens, as under SequenceParallel, would train different
    copies of it. On an accelerator the host learns of it at the next call.
    """

    def __init__(
        self, leaves: Sequence[Leaf], parts: Sequence[Sequence[int]], ranks: Ranks, device: torch.device
    ) -> None:
        """`parts`: the parameters of each leaf."""
        names = {
            part: leaf.name
            for leaf, of_leaf in zip(leaves, parts, strict=True)
            for part in of_leaf
            if leaf.cut is None and ranks.tensor_parallel > 1
        }
        self._names = list(names.values())
        self._indices = torch.tensor(list(names), dtype=torch.int64, device=device)
        self._arriving: torch.Tensor | None = None  # [copies, T + 1], at last the whole gradient's
        self._arrived: torch.Event | None = None

    def check(self, verdict: _C.Verdict) -> None:
        """Raises ValueError on all ranks if a matrix's gradients differ."""
        if not self._names:
            return
        words = verdict.squared_norms_of_ranks()[self._indices]
        words = torch.cat([words, verdict.norm().square().expand(len(words), 1)], 1)
        if words.is_cpu:
            self._require_equal(words)
            return
        if self._arrived is not None and self._arriving is not None:
            self._arrived.synchronize()  # of the step before
            self._require_equal(self._arriving)
        self._arriving = torch.empty(words.shape, dtype=words.dtype, device="cpu", pin_memory=True)
        self._arriving.copy_(words, non_blocking=True)
        self._arrived = torch.Event(words.device)
        self._arrived.record()

    def _require_equal(self, words: torch.Tensor) -> None:
        words, whole = words[:, :-1], words[:, -1]
        least, most = words.aminmax(dim=1)
        differ = (most - least > _TOLERANCE * most + _NOISE * whole).nonzero().flatten().tolist()
        if differ:
            norms = [f"{norm:.3g}" for norm in (words[differ[0]] * words.shape[1]).sqrt().tolist()]
            raise ValueError(
                f"dmuon: '{self._names[differ[0]]}' is whole on all ranks of tensor parallelism, and these have "
                f"computed gradients of norms {', '.join(norms)}: of different tokens, as under SequenceParallel, so "
                "that its copies would become different. Expected: its module in the plan of parallelize_module, so "
                "that DTensor adds its gradients up; or all tokens as its input."
            )
