"""The baseline that dmuon is measured against computes Muon's update too."""

from __future__ import annotations

import muon_ag_cases as cases
import pytest
import torch
from models import batch, is_matrix_of_a_block, loss_of, make_gpt, weights_of_plain

STEPS = 4
OPTIONS = {"lr": 2e-2, "weight_decay": 0.1}


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


# Both iterate in bf16, which lets sums in another order differ by up to 1.9 %.
# Matrices whose rows the ranks do and do not divide; one pack, or one for each matrix.
@pytest.mark.parametrize(("mesh", "pack_bytes"), [((4,), 8 << 20), ((2, 2), 1), ((3,), 20_000)])
def test_the_baseline_equals_torch_muon(ranks, mesh, pack_bytes):
    initial, expected = by_torch()
    for got in ranks.run(cases.train, mesh, steps=STEPS, pack_bytes=pack_bytes, options=OPTIONS):
        assert got.keys() == expected.keys()
        for name, weight in expected.items():
            error = (got[name] - weight).norm() / (weight - initial[name]).norm()
            assert error <= 0.03, f"{name}: {error:.2e}"
