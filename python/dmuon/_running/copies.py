"""What all ranks of tensor parallelism have: their copies stay equal only if their gradients are."""

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
    """Compares the norms of the gradients that the ranks of a slot have for one parameter. Sends nothing.

    Ranks that compute a gradient from different tokens, as under SequenceParallel or with data of their own, would
    train different copies of what they all have. Of Muon's matrices each is compared, of AdamW's parameters all
    together. On an accelerator the host learns of it at the next call.
    """

    def __init__(
        self, leaves: Sequence[Leaf], parts: Sequence[Sequence[int]], ranks: Ranks, device: torch.device
    ) -> None:
        """`parts`: the parameters of each leaf."""
        names = {
            part: leaf.name for leaf, of_leaf in zip(leaves, parts, strict=True) for part in of_leaf if leaf.cut is None
        }
        self._tensor_parallel = ranks.tensor_parallel
        self._names = [f"'{name}'" for name in names.values()]
        self._names += [f"AdamW's parameters, of shard {slot}," for slot in range(ranks.num_slots)]
        self._indices = torch.tensor(list(names), dtype=torch.int64, device=device)
        self._arriving: torch.Tensor | None = None  # [copies, T + 1], at last the whole gradient's
        self._arrived: torch.Event | None = None

    def check(self, verdict: _C.Verdict) -> None:
        """Raises ValueError on all ranks if gradients of copies differ."""
        if self._tensor_parallel == 1:
            return
        of_matrices = verdict.squared_norms_of_ranks()[self._indices] * self._tensor_parallel
        words = torch.cat([of_matrices, verdict.squared_norms_of_copies().T])
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
            norms = ", ".join(f"{norm:.3g}" for norm in words[differ[0]].sqrt().tolist())
            raise ValueError(
                f"dmuon: {self._names[differ[0]]} is whole on all ranks of tensor parallelism, and these have computed "
                f"gradients of norms {norms}: of different tokens, so that its copies would become different. "
                "Expected: the same data on all ranks of a group; and of a module whose input is divided, as under "
                "SequenceParallel, its place in the plan of parallelize_module, so that DTensor adds its gradients up."
            )
