"""What a step under tensor parallelism must not mix up: batches on their way at once, and sums that are still open."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn
import torch.nn.functional as F
from dmuon._setup.slices import Slices
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from tp_models import OnRanks, make_model, meshes, too_far, trained_alone
from training import KEPT, ON_DEMAND

import dmuon

STEPS, DEPTH = 4, 3
DIMS = (2, 1, 2)


def batches(mesh: DeviceMesh, schedule: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Weights, and how many batches of a shape each owner has, by its number and that shape."""
    options = {**schedule, "strategy": "round_robin"}
    ranks = OnRanks(mesh.device_type, DIMS, options=options, sequence=False, gate=True, layers=DEPTH)
    ranks.run(STEPS)
    plan = dmuon.plan(ranks.model)
    found = {f"{owner} {plan.native.inventory[one[0]].shape_text()}": len(one) for owner, one in plan.batches}
    return ranks.saved(), found


def test_several_batches_of_each_owner_do_not_mix(ranks):
    before, expected, most = trained_alone(make_model(gate=True, layers=DEPTH), DIMS[0] * DIMS[1], STEPS)
    for schedule in (KEPT, ON_DEMAND):
        for saved, found in ranks.run(batches, (4,), schedule=schedule):
            assert not too_far(before, expected, saved, most)
            for owner in range(4):  # of unequal shapes, so that a mistaken buffer cannot fit
                assert sum(key.startswith(f"{owner} ") for key in found) >= 2, found


def replicate_gates(model: nn.Module, mesh: DeviceMesh) -> None:
    """All ranks of a group have a gate whole, and each computes with its part of the sequence."""
    for block in model.blocks:
        gate = block.gate
        gate.weight = nn.Parameter(distribute_tensor(gate.weight.detach(), mesh, [Replicate()]))

        def forward(x: Any, gate: nn.Module = gate) -> Any:
            by_token: Any = DTensor.from_local(x.transpose(0, 1).contiguous(), mesh, [Shard(0)], run_check=False)
            y: Any = F.linear(by_token, gate.weight)
            return y.to_local().transpose(0, 1)

        gate.forward = forward


def open_sums(mesh: DeviceMesh) -> tuple[dict[str, Any], int]:
    """Weights, and how many gradients came as sums that the ranks of a group have still to add up."""
    _, tensor = meshes((2, 2), mesh.device_type)
    num_open, of_gradient = 0, Slices.of_gradient

    def counted(slices: Slices, gradient: Any) -> Any:
        nonlocal num_open
        num_open += slices.placement == Replicate() and any(one.is_partial() for one in gradient.placements)
        return of_gradient(slices, gradient)

    Slices.of_gradient = counted
    try:
        ranks = OnRanks(
            mesh.device_type, (2, 2), prepare=functools.partial(replicate_gates, mesh=tensor), gate=True, layers=DEPTH
        )
        ranks.run(STEPS)
    finally:
        Slices.of_gradient = of_gradient
    return ranks.saved(), num_open


def test_a_gradient_that_arrives_as_an_open_sum_is_added_up(ranks):
    before, expected, most = trained_alone(make_model(gate=True, layers=DEPTH), 2, STEPS)
    for saved, num_open in ranks.run(open_sums, (4,)):
        assert num_open == STEPS * DEPTH
        assert not too_far(before, expected, saved, most)
