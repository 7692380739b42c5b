"""Training by the baseline of bench/, on the ranks of a pool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from models import batch, is_matrix_of_a_block, loss_of, make_gpt, part
from torch.distributed.tensor import DTensor
from torch.optim._muon import _zeropower_via_newtonschulz
from trajectory_cases import place_of, shard

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.muon_ag import QUINTIC, MuonAG


def by_torch(updates: torch.Tensor) -> torch.Tensor:
    """torch.optim.Muon's own iteration, in bf16."""
    return torch.stack([_zeropower_via_newtonschulz(update, QUINTIC, 5, 1e-7) for update in updates])


def train(mesh: Any, steps: int, pack_bytes: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = make_gpt()
    shard(model, mesh)
    matrices = [p for n, p in model.named_parameters() if is_matrix_of_a_block(n, p)]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizer = MuonAG(matrices, rest, orthogonalize=by_torch, pack_bytes=pack_bytes, **options)
    rank, size = place_of(mesh)
    for step in range(steps):
        loss_of(model, part(batch(step), rank, size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().full_tensor() for n, p in model.named_parameters() if isinstance(p, DTensor)}
