"""The baseline that dmuon is measured against computes Muon's update too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch, is_matrix_of_a_block, loss_of, make_gpt, part, weights_of_plain
from torch.distributed.tensor import DTensor
from torch.optim._muon import _zeropower_via_newtonschulz
from training import LR, WEIGHT_DECAY, place_of, shard

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.muon_ag import QUINTIC, MuonAG

STEPS = 4
OPTIONS = {"lr": LR, "weight_decay": WEIGHT_DECAY}


def by_torch():
    """(initial weights, weights after STEPS) of torch.optim.Muon and AdamW on one process."""
    model = make_gpt()
    initial = weights_of_plain(model)
    matrices = {n: p for n, p in model.named_parameters() if is_matrix_of_a_block(n, p)}
    rest = [p for n, p in model.named_parameters() if n not in matrices]
    muon = torch.optim.Muon(matrices.values(), **OPTIONS)
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), **OPTIONS)
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        muon.step()
        adamw.step()
        model.zero_grad()
    return initial, weights_of_plain(model)


def iterated_by_torch(updates: torch.Tensor) -> torch.Tensor:
    """torch.optim.Muon's own iteration, in bf16."""
    return torch.stack([_zeropower_via_newtonschulz(update, QUINTIC, 5, 1e-7) for update in updates])


def train(mesh: Any, pack_bytes: int) -> dict[str, torch.Tensor]:
    model = make_gpt()
    shard(model, mesh)
    matrices = [p for n, p in model.named_parameters() if is_matrix_of_a_block(n, p)]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizer = MuonAG(matrices, rest, orthogonalize=iterated_by_torch, pack_bytes=pack_bytes, **OPTIONS)
    rank, size = place_of(mesh)
    for step in range(STEPS):
        loss_of(model, part(batch(step), rank, size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().full_tensor() for n, p in model.named_parameters() if isinstance(p, DTensor)}


# Both iterate in bf16, which lets sums in another order differ by up to 1.9 %.
# Matrices whose rows the ranks do and do not divide; one pack, or one for each matrix.
@pytest.mark.parametrize(("mesh", "pack_bytes"), [((4,), 8 << 20), ((2, 2), 1), ((3,), 20_000)])
def test_the_baseline_equals_torch_muon(ranks, mesh, pack_bytes):
    initial, expected = by_torch()
    for got in ranks.run(train, mesh, pack_bytes=pack_bytes):
        assert got.keys() == expected.keys()
        for name, weight in expected.items():
            error = (got[name] - weight).norm() / (weight - initial[name]).norm()
            assert error <= 0.03, f"{name}: {error:.2e}"
