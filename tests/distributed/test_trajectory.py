"""The product's promise: on every mesh the weights that one process would compute."""

from __future__ import annotations

import pytest
import torch
import trajectory_cases as cases
from models import batch, is_matrix_of_a_block, loss_of, make_gpt, weights_of_plain
from reference import POLAR_EXPRESS, ReferenceMuon

LR = 2e-2
STEPS = 10
FEW = 4  # of what the other tests have in common with the first


@pytest.fixture(scope="session")
def reference():
    """[steps] weights after so many steps on one process in fp32."""
    model = make_gpt()
    weights = [weights_of_plain(model)]
    names = [n for n, p in model.named_parameters() if is_matrix_of_a_block(n, p)]
    optimizer = ReferenceMuon(model, names, LR, 0.1, rows=POLAR_EXPRESS)
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(weights_of_plain(model))
    return weights


def worst(initial, expected, got):
    """Largest |W - W_ref| / |W_ref - W_0| over the parameters."""
    return max((float((got[n] - w).norm() / (w - initial[n]).norm()), n) for n, w in expected.items())


# Mesh with strategy and options; on 2 x 2 every lookahead with either value of the other two and all four pairs,
# beside FSDP2 and on plain replicas.
COVERING = [
    ((1,), "load_balance", True, True, 2, True),
    ((2,), "round_robin", False, True, 1, True),
    ((4,), "load_balance", True, True, 2, True),
    ((4,), "rank0", False, False, 0, True),
    ((2, 2), "load_balance", True, True, 2, True),
    ((2, 2), "round_robin", False, False, 2, True),
    ((2, 2), "rank0", True, True, 0, True),
    ((4, 1), "round_robin", True, True, 9, True),
    ((4, 1), "load_balance", False, False, 1, True),
    ((3,), "rank0", True, False, 5, True),
    ((3,), "load_balance", False, True, 2, True),
    *(
        (
            (2, 2),
            "load_balance",
            reshard,
            (lookahead % 2 == 0) == reshard,
            lookahead,
            (lookahead // 2 % 2 == 0) == reshard,
        )
        for lookahead in range(10)
        for reshard in (True, False)
    ),
]


@pytest.mark.parametrize(("mesh", "strategy", "reshard", "node_copy", "lookahead", "fsdp"), COVERING)
def test_weights_equal_a_single_process(ranks, reference, mesh, strategy, reshard, node_copy, lookahead, fsdp):
    options = {
        "strategy": strategy,
        "reshard_after_forward": reshard,
        "node_copy": node_copy,
        "lookahead": lookahead,
    }
    expect_reference(reference, ranks.run(cases.train, mesh, steps=STEPS, lr=LR, dedicate=options, fsdp=fsdp), STEPS)


def expect_reference(reference, results, steps=FEW):
    initial, expected = reference[0], reference[steps]
    for got in results:
        ratio, name = worst(initial, expected, got)
        assert ratio <= 1e-3, f"{name}: {ratio:.2e}"


@pytest.mark.parametrize("max_units", [2, 3])
@pytest.mark.parametrize("node_copy", [True, False])
def test_a_limit_of_units_in_flight_changes_no_weight(ranks, reference, max_units, node_copy):
    options = {"max_units_in_flight": max_units, "lookahead": 4, "node_copy": node_copy}
    expect_reference(reference, ranks.run(cases.train, (2, 2), steps=FEW, lr=LR, dedicate=options))


@pytest.mark.parametrize(
    "ablation", [{"asynchronous": False}, {"broadcast_before_reduce": False}, {"one_stage": True}], ids=str
)
def test_what_ablations_switch_off_changes_no_weight(ranks, reference, ablation):
    expect_reference(reference, ranks.run(cases.train, (2, 2), steps=FEW, lr=LR, schedule=ablation))


# One backward, or all but the last, or all of a step, keep their gradients inside the node.
@pytest.mark.parametrize(
    ("mesh", "fsdp", "held"),
    [
        ((4,), True, (0, 1)),
        ((4,), False, (0, 1, 2)),
        ((2, 2), True, (0,)),
        ((2, 2), True, (0, 1)),
        ((2, 2), True, (1,)),
        ((2, 2), False, (0, 1, 2)),
        ((4, 1), True, (1,)),
        ((4, 1), False, (0, 1, 2)),
    ],
)
def test_no_sync_changes_no_weight(ranks, reference, mesh, fsdp, held):
    results = ranks.run(cases.train, mesh, steps=FEW, lr=LR, fsdp=fsdp, micro_steps=3, held=held)
    expect_reference(reference, results)


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)])
@pytest.mark.parametrize("held", [(), (0, 1)])
def test_what_no_sync_kept_and_zero_grad_cleared_leaves_no_trace(ranks, reference, mesh, held):
    results = ranks.run(cases.train, mesh, steps=FEW, lr=LR, fsdp=False, micro_steps=2, held=held, discard=True)
    expect_reference(reference, results)


# Two hosts of two: two stages on a mesh of one dimension.
@pytest.mark.parametrize("fsdp", [True, False])
def test_a_mesh_of_one_dimension_over_hosts_equals_a_single_process(ranks, reference, fsdp):
    expect_reference(reference, ranks.run(cases.train_on_hosts, (4,), steps=FEW, lr=LR, fsdp=fsdp))


@pytest.mark.parametrize(
    ("mesh", "size", "rows"),
    [
        ((4,), 2, ((0, 1), (2, 3))),
        ((4,), 4, ((0, 1, 2, 3),)),
        ((4,), 1, ((0, 1, 2, 3),)),  # a node copy would be the whole model
        ((4,), 3, ((0, 1, 2, 3),)),  # hosts of different sizes
        ((2, 2), 4, ((0, 1), (2, 3))),  # as the mesh says
    ],
)
def test_hosts_make_rows_and_change_no_norm(ranks, mesh, size, rows):
    model = make_gpt()
    loss_of(model, batch(0)).backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for got, norm in ranks.run(cases.norm_on_hosts, mesh, size=size):
        assert got == rows
        assert norm == pytest.approx(expected, rel=1e-5)


def test_one_device_without_a_process_group(reference):
    expect_reference(reference, [cases.train(None, steps=STEPS, lr=LR)], STEPS)
