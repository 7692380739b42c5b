"""The product's promise: on every mesh the weights that one process would compute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import batch, is_matrix_of_a_block, loss_of, make_gpt, part, weights_of_plain
from reference import POLAR_EXPRESS, ReferenceMuon
from scenario import assert_equal_to_reference
from training import (
    AHEAD,
    FAR_AHEAD,
    KEPT,
    KEPT_NO_COPY,
    LR,
    NO_COPY,
    ON_DEMAND,
    REPLICATED,
    WEIGHT_DECAY,
    dedicate,
    place_of,
    shard,
    weights_of,
)

import dmuon

STEPS = 4
FEW = 3  # of what the other tests have in common with the first


@pytest.fixture(scope="session")
def reference():
    """[steps] weights after so many steps on one process in fp32."""
    model = make_gpt()
    weights = [weights_of_plain(model)]
    names = [n for n, p in model.named_parameters() if is_matrix_of_a_block(n, p)]
    optimizer = ReferenceMuon(model, names, LR, WEIGHT_DECAY, rows=POLAR_EXPRESS)
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(weights_of_plain(model))
    return weights


def expect_reference(reference, results, steps=FEW):
    assert results
    for got in results:
        assert_equal_to_reference(reference[0], reference[steps], got)


def train(
    mesh: Any,
    schedule: dict[str, Any],
    steps: int,
    fsdp: bool = True,
    options: dict[str, Any] | None = None,
    micro_steps: int = 1,
    held: tuple[int, ...] = (),
    ablation: dict[str, Any] | None = None,
    discard: bool = False,
) -> dict[str, torch.Tensor]:
    """Trains and returns every weight; micro-steps in `held` run under no_sync.

    With `discard` each step begins with NaNs under no_sync, which are cleared.
    """
    model = make_gpt()
    dedicate(model, mesh, schedule, **(options or {}))
    if fsdp and mesh is not None:
        shard(model, mesh)
    for name, value in (ablation or {}).items():
        setattr(model._dmuon_dedication.ablation, name, value)
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    rank, size = place_of(mesh)
    for step in range(steps):
        mine = part(batch(step), rank, size)
        if discard:
            with contextlib.suppress(InterruptedError), dmuon.no_sync(model):
                with dmuon.no_sync(model):
                    (loss_of(model, mine) * float("nan")).backward()
                (loss_of(model, mine) * float("nan")).backward()  # the outer context still holds
                optimizer.zero_grad()
                raise InterruptedError
        micro_batches = mine.chunk(micro_steps)
        for index, micro in enumerate(micro_batches):
            with dmuon.no_sync(model) if index in held else contextlib.nullcontext():
                (loss_of(model, micro) * len(micro) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


# Mesh with strategy, reshard_after_forward, node_copy, lookahead, and whether beside FSDP2 or on plain replicas. On
# 2 x 2 every pair of values of the last four: lookaheads of none, one, some, and more units than the model has.
COVERING = [
    ((1,), "load_balance", True, True, 2, True),
    ((2,), "round_robin", False, True, 1, True),
    ((4,), "load_balance", True, True, 2, True),
    ((4,), "rank0", False, False, 0, True),
    ((4, 1), "round_robin", True, True, 9, True),
    ((4, 1), "load_balance", False, False, 1, True),
    ((3,), "rank0", True, False, 5, True),
    ((3,), "load_balance", False, True, 2, True),
    ((2, 2), "round_robin", True, True, 0, True),
    ((2, 2), "rank0", False, False, 0, False),
    ((2, 2), "load_balance", True, False, 1, False),
    ((2, 2), "load_balance", False, True, 1, True),
    ((2, 2), "load_balance", True, True, 2, False),
    ((2, 2), "round_robin", False, False, 2, True),
    ((2, 2), "load_balance", True, False, 3, True),
    ((2, 2), "load_balance", False, True, 3, False),
    ((2, 2), "rank0", True, True, 9, True),
    ((2, 2), "load_balance", False, False, 9, False),
]


@pytest.mark.parametrize(("mesh", "strategy", "reshard", "node_copy", "lookahead", "fsdp"), COVERING)
def test_weights_equal_a_single_process(ranks, reference, mesh, strategy, reshard, node_copy, lookahead, fsdp):
    schedule = {"reshard_after_forward": reshard, "node_copy": node_copy, "lookahead": lookahead}
    results = ranks.run(train, mesh, schedule=schedule, steps=STEPS, options={"strategy": strategy}, fsdp=fsdp)
    expect_reference(reference, results, STEPS)


# Without fully_shard, as in place of DistributedDataParallel, and with it.
@pytest.mark.parametrize("mesh", [(1,), (3,), (4,), (2, 2), (4, 1)])
@pytest.mark.parametrize(("fsdp", "late"), [(False, True), (False, False), (True, True)])
def test_replicated_weights_equal_a_single_process(ranks, reference, mesh, fsdp, late):
    schedule = {**REPLICATED, "late_updates": late}
    results = ranks.run(train, mesh, schedule=schedule, steps=STEPS, fsdp=fsdp, micro_steps=2)
    expect_reference(reference, results, STEPS)


@pytest.mark.parametrize("max_units", [2, 3])
@pytest.mark.parametrize("node_copy", [True, False])
def test_a_limit_of_units_in_flight_changes_no_weight(ranks, reference, max_units, node_copy):
    schedule = {**AHEAD, "lookahead": 4, "node_copy": node_copy}
    options = {"max_units_in_flight": max_units}
    expect_reference(reference, ranks.run(train, (2, 2), schedule=schedule, steps=FEW, options=options))


@pytest.mark.parametrize(
    ("ablation", "schedule"),
    [({"one_stage": True}, NO_COPY), ({"batching": False}, AHEAD)],
    ids=str,
)
def test_what_ablations_switch_off_changes_no_weight(ranks, reference, ablation, schedule):
    expect_reference(reference, ranks.run(train, (2, 2), schedule=schedule, steps=FEW, ablation=ablation))


# One backward, or all but the last, or all of a step, keep their gradients inside the node.
@pytest.mark.parametrize(
    ("mesh", "fsdp", "held", "schedule"),
    [
        ((4,), True, (0, 1), AHEAD),
        ((4,), False, (0, 1, 2), KEPT),
        ((2, 2), True, (0,), KEPT_NO_COPY),
        ((2, 2), True, (0, 1), ON_DEMAND),
        ((2, 2), True, (1,), FAR_AHEAD),
        ((2, 2), False, (0, 1, 2), NO_COPY),
        ((4, 1), True, (1,), KEPT),
        ((4, 1), False, (0, 1, 2), AHEAD),
        ((2, 2), False, (0, 1), REPLICATED),
    ],
)
def test_no_sync_changes_no_weight(ranks, reference, mesh, fsdp, held, schedule):
    results = ranks.run(train, mesh, schedule=schedule, steps=FEW, fsdp=fsdp, micro_steps=3, held=held)
    expect_reference(reference, results)


@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)])
@pytest.mark.parametrize(("held", "schedule"), [((), AHEAD), ((0, 1), NO_COPY)])
def test_what_no_sync_kept_and_zero_grad_cleared_leaves_no_trace(ranks, reference, mesh, held, schedule):
    results = ranks.run(train, mesh, schedule=schedule, steps=FEW, fsdp=False, micro_steps=2, held=held, discard=True)
    expect_reference(reference, results)


@contextlib.contextmanager
def hosts_of(size: int) -> Iterator[None]:
    """As if each host had `size` ranks."""
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    try:
        yield
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def train_on_hosts(mesh: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    with hosts_of(2):
        return train(mesh, **kwargs)


# Two hosts of two: two stages on a mesh of one dimension.
@pytest.mark.parametrize(("fsdp", "schedule"), [(True, FAR_AHEAD), (False, NO_COPY)])
def test_a_mesh_of_one_dimension_over_hosts_equals_a_single_process(ranks, reference, fsdp, schedule):
    results = ranks.run(train_on_hosts, (4,), schedule=schedule, steps=FEW, fsdp=fsdp)
    expect_reference(reference, results)


def norm_on_hosts(mesh: Any, size: int) -> tuple[tuple[tuple[int, ...], ...], float]:
    """(rows that dmuon makes of the mesh, gradient norm of a first step)."""
    model = make_gpt()
    with hosts_of(size):
        dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    dmuon.Muon(model)
    loss_of(model, part(batch(0), *place_of(mesh))).backward()
    return model._dmuon_dedication.ranks.rows, float(dmuon.clip_grad_norm_(model, 1.0))


@pytest.mark.parametrize(
    ("mesh", "size", "rows"),
    [
        ((4,), 2, ((0, 1), (2, 3))),
        ((2, 2), 4, ((0, 1), (2, 3))),  # as the mesh says
    ],
)
def test_hosts_make_rows_and_change_no_norm(ranks, mesh, size, rows):
    model = make_gpt()
    loss_of(model, batch(0)).backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for got, norm in ranks.run(norm_on_hosts, mesh, size=size):
        assert got == rows
        assert norm == pytest.approx(expected, rel=1e-5)


def test_one_device_without_a_process_group(reference):
    expect_reference(reference, [train(None, AHEAD, steps=STEPS)], STEPS)
