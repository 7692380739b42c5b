"""A predicted step has the operations of the engine's own, in their order: `dmuon simulate` runs what training runs."""

from __future__ import annotations

import json

import pytest
from models import make_gpt
from profiled import MESHES, Trained
from training import AHEAD

import dmuon
from dmuon import _plan

OUTSIDE = "outside of Muon"


def planned(mesh, schedule):
    """This rank's operations in a step, as the engine's schedule says, and the plan that it follows."""
    trained = Trained(mesh, schedule)
    passes = dmuon.schedule(trained.model).passes
    issued = [(o.lane, o.kind, o.unit) for operations in passes.values() for o in operations]
    issued = [one for one in issued if one[1] not in ("forward", "backward")]
    units = [unit.label for unit in trained.optimizer._runtime.units]
    return issued, dmuon.plan(trained.model).to_json(), units


def steps(results, outside_elements):
    """The operations of each rank's step, as predicted and as issued."""
    inventory = dmuon.inventory(make_gpt())
    inventory["training"] = {"outside_elements": outside_elements, "outside_flops": 0}
    model = _plan.model_from_json(json.dumps(inventory))
    for rank, (issued, text, units) in enumerate(results):
        plan = _plan.Plan.from_json(text)
        batches = [f"batch {i}" for i in range(sum(owner == rank for owner, _ in plan.batches))]
        named = {"unit": [OUTSIDE, *units], "batch": batches}
        yield [(lane, kind, named[what][i]) for lane, kind, what, i in _plan.issued(plan, model, rank)], issued


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("node_copy", "lookahead"), [(True, 2), (False, 1)])
def test_a_predicted_step_issues_what_the_engine_issues(ranks, mesh, late, node_copy, lookahead):
    options = {**AHEAD, "node_copy": node_copy, "lookahead": lookahead, "late_updates": late}
    results = ranks.run(planned, mesh, schedule=options)
    for predicted, issued in steps(results, outside_elements=0):
        assert predicted == issued


@pytest.mark.parametrize("mesh", MESHES)
def test_beside_fsdp2s_parameters_lanes_keep_their_order(ranks, mesh):
    """In a prediction the resolver moves these too, as the first unit. So others come earlier or later by one use."""
    results = ranks.run(planned, mesh, schedule={**AHEAD, "late_updates": True})
    for predicted, issued in steps(results, outside_elements=5000):
        for lane in ("intra", "inter", "update"):
            found = [one for one in predicted if one[0] == lane and one[2] != OUTSIDE]
            expected = [one for one in issued if one[0] == lane]
            assert found in [expected[i:] + expected[:i] for i in range(max(1, len(expected)))], lane
