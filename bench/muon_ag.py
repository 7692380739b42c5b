"""Muon-AG: the all-gather baseline, as good as that design gets.

Matrices stay sharded by FSDP2. Each rank smooths its gradient shards with momentum (1/G of the work),
then every matrix's update is gathered whole and every rank orthogonalises all of them, keeping its own
rows. It has every improvement that this design allows:

- Updates travel in bf16, the dtype in which the iteration computes.
- Many matrices share one all-gather (a pack). The next pack travels while the current one is
  orthogonalised, and the AdamW step of the other parameters runs while the first pack travels.
- A replicated mesh (HSDP) gathers inside the shard dimension only.

Cost a step and rank, with W matrix elements on R x G ranks: (G - 1)/G * 2 W bytes received, and the
Newton-Schulz work of all W elements, R * G times a rank's work if it were shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

# [n, rows, cols] bf16 to the orthogonalised updates, same shape.
Orthogonalize = Callable[[Tensor], Tensor]

QUINTIC = (3.4445, -4.7750, 2.0315)

# Newer torch renamed it and warns under the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def best_orthogonalize() -> tuple[str, Orthogonalize]:
    """Returns name and function of the fastest iteration at hand: dmuon's own, else torch.optim.Muon's."""
    try:
        import dmuon
    except ImportError:
        from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz

        def reference(updates: Tensor) -> Tensor:
            return torch.stack([newton_schulz(update, QUINTIC, 5, 1e-7) for update in updates])

        return "torch.optim.Muon", reference
    return "dmuon.orthogonalize", dmuon.orthogonalize


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_group(matrix: Tensor) -> dist.ProcessGroup | None:
    """The group over which dimension 0 is sharded; None for a plain tensor."""
    if not isinstance(matrix, DTensor):
        return None
    for dim, placement in enumerate(matrix.placements):
        if placement.is_shard(0):
            return matrix.device_mesh.get_group(dim)
        if not placement.is_replicate():
            raise ValueError(f"MuonAG: matrices must be Shard(0) or Replicate(); got {matrix.placements}")
    return None


@dataclass(frozen=True)
class _Shape:
    """The matrices of one shape in a pack, and where they lie in its buffer."""

    matrices: list[Tensor]
    rows: int
    cols: int
    chunk: int  # rows of the largest shard: ceil(rows / G)
    offset: int  # elements
    numel: int  # elements that one rank sends


@dataclass(frozen=True)
class _Pack:
    shapes: list[_Shape]
    numel: int  # elements that one rank sends
    ragged: bool


def _make_packs(matrices: list[Tensor], num_shards: int, pack_bytes: int) -> list[_Pack]:
    """Fills packs in parameter order up to `pack_bytes` of gathered bf16, then sorts each by shape."""
    bins: list[list[Tensor]] = [[]]
    filled = 0
    for matrix in matrices:
        size = 2 * matrix.numel()
        if bins[-1] and filled + size > pack_bytes:
            bins.append([])
            filled = 0
        bins[-1].append(matrix)
        filled += size
    packs = []
    for members in bins:
        shapes, offset = [], 0
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for matrix in members:
            by_shape.setdefault(tuple(matrix.shape), []).append(matrix)
        for (rows, cols), same in by_shape.items():
            chunk = math.ceil(rows / num_shards)
            numel = len(same) * chunk * cols
            shapes.append(_Shape(same, rows, cols, chunk, offset, numel))
            offset += numel
        packs.append(_Pack(shapes, offset, any(s.rows % num_shards for s in shapes)))
    return packs


class MuonAG(torch.optim.Optimizer):
    """torch.optim.Muon's update rule on FSDP2's shards by all-gather; fused AdamW for the rest.

    @param matrices     2-D parameters: DTensors, Shard(0) over one mesh dimension, or plain tensors.
    @param rest         parameters for AdamW; may be empty.
    @param pack_bytes   gathered bytes of one all-gather.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        rest: Iterable[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        orthogonalize: Orthogonalize | None = None,
        pack_bytes: int = 8 << 20,
    ) -> None:
        owned = list(matrices)
        super().__init__(owned, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov})
        self._orthogonalize = orthogonalize or best_orthogonalize()[1]
        self._group = _shard_group(owned[0])
        self._num_shards = self._group.size() if self._group else 1
        self._shard = self._group.rank() if self._group else 0
        self._packs = _make_packs(owned, self._num_shards, pack_bytes)
        others = list(rest)
        self._adamw = None
        if others:
            self._adamw = torch.optim.AdamW(
                others,
                lr=lr if adamw_lr is None else adamw_lr,
                betas=adamw_betas,
                eps=adamw_eps,
                weight_decay=weight_decay if adamw_weight_decay is None else adamw_weight_decay,
                fused=True,
            )
            # Shared dictionaries: a scheduler that writes here steers the inner optimizer too.
            self.param_groups.extend(self._adamw.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        travelling = self._send(self._packs[0])
        if self._adamw is not None:
            self._adamw.step()
        for index, pack in enumerate(self._packs):
            gathered, work = travelling
            if index + 1 < len(self._packs):
                travelling = self._send(self._packs[index + 1])
            if work is not None:
                work.wait()
            for shape in pack.shapes:
                self._apply(shape, gathered)
        return loss

    def _send(self, pack: _Pack) -> tuple[Tensor, dist.Work | None]:
        """Momentum on this rank's shards, then the asynchronous gather: [G, pack.numel] bf16."""
        group = self.param_groups[0]
        device = pack.shapes[0].matrices[0].device
        allocate = torch.zeros if pack.ragged else torch.empty  # padding must not hold NaN
        packed = allocate(pack.numel, dtype=torch.bfloat16, device=device)
        for shape in pack.shapes:
            grads, buffers = [], []
            for matrix in shape.matrices:
                if matrix.grad is None:
                    raise ValueError("MuonAG.step: every matrix must have a gradient; got None")
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                grads.append(_local(matrix.grad))
                buffers.append(_local(state["momentum_buffer"]))
            torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
            slots = packed[shape.offset : shape.offset + shape.numel].view(-1, shape.chunk, shape.cols)
            torch._foreach_copy_([slot[: len(grad)] for slot, grad in zip(slots, grads, strict=True)], updates)
        if self._num_shards == 1:
            return packed.unsqueeze(0), None
        gathered = packed.new_empty(self._num_shards, pack.numel)
        work = _all_gather(gathered.view(-1), packed, group=self._group, async_op=True)
        return gathered, work

    def _apply(self, shape: _Shape, gathered: Tensor) -> None:
        """Orthogonalises all matrices of one shape; applies the rows this rank holds."""
        group = self.param_groups[0]
        count = len(shape.matrices)
        part = gathered[:, shape.offset : shape.offset + shape.numel]
        whole = part.view(self._num_shards, count, shape.chunk, shape.cols).transpose(0, 1)
        whole = whole.reshape(count, self._num_shards * shape.chunk, shape.cols)[:, : shape.rows]
        orthogonal = self._orthogonalize(whole)
        locals_ = [_local(matrix) for matrix in shape.matrices]
        first = min(self._shard * shape.chunk, shape.rows)
        mine = orthogonal[:, first : first + len(locals_[0])].to(locals_[0].dtype)
        adjusted_lr = group["lr"] * math.sqrt(max(1.0, shape.rows / shape.cols))
        torch._foreach_mul_(locals_, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(locals_, list(mine), alpha=-adjusted_lr)
