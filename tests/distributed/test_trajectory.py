"""The product's promise: on every mesh the weights that one process would compute."""

from __future__ import annotations

import pytest
import trajectory_cases as cases
from models import batch, loss_of, make_gpt
from reference import POLAR_EXPRESS, ReferenceMuon

LR = 2e-2
STEPS = 10


def muon_names(model):
    return [n for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]


@pytest.fixture(scope="session")
def reference():
    """(initial, final) weights of ten steps on one process in fp32."""
    model = make_gpt()
    initial = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = ReferenceMuon(model, muon_names(model), LR, 0.1, rows=POLAR_EXPRESS)
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return initial, {n: p.detach() for n, p in model.named_parameters()}


def worst(initial, expected, got):
    """Largest |W - W_ref| / |W_ref - W_0| over the parameters."""
    return max((float((got[n] - w).norm() / (w - initial[n]).norm()), n) for n, w in expected.items())


# A pairwise covering of mesh, strategy, reshard_after_forward and node_copy.
COVERING = [
    ((1,), "load_balance", True, True),
    ((2,), "round_robin", False, True),
    ((4,), "load_balance", True, True),
    ((4,), "rank0", False, False),
    ((2, 2), "load_balance", True, True),
    ((2, 2), "round_robin", False, False),
    ((2, 2), "rank0", True, True),
    ((4, 1), "round_robin", True, True),
    ((4, 1), "load_balance", False, False),
    ((3,), "rank0", True, False),
    ((3,), "load_balance", False, True),
]


@pytest.mark.parametrize(("mesh", "strategy", "reshard", "node_copy"), COVERING)
def test_weights_equal_a_single_process(ranks, reference, mesh, strategy, reshard, node_copy):
    options = {"strategy": strategy, "reshard_after_forward": reshard, "node_copy": node_copy}
    results = ranks.run(cases.train, mesh, steps=STEPS, lr=LR, dedicate=options)
    initial, expected = reference
    for got in results:
        ratio, name = worst(initial, expected, got)
        assert ratio <= 1e-3, f"{name}: {ratio:.2e}"


def test_one_device_without_a_process_group(reference):
    initial, expected = reference
    ratio, name = worst(initial, expected, cases.train(None, steps=STEPS, lr=LR))
    assert ratio <= 1e-3, f"{name}: {ratio:.2e}"
