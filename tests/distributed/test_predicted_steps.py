"""A predicted step has the operations of the engine's own, in their order: `dmuon simulate` runs what training runs."""

from __future__ import annotations

import json

import pytest
from models import make_gpt
from profiled import MESHES, Trained
from training import AHEAD

import dmuon
from dmuon import _plan


def planned(mesh, schedule):
    """This rank's operations in a step, as the engine's schedule says, and the plan that it follows."""
    trained = Trained(mesh, schedule)
    passes = dmuon.schedule(trained.model).passes
    issued = [(o.lane, o.kind, o.unit) for operations in passes.values() for o in operations]
    issued = [one for one in issued if one[1] not in ("forward", "backward")]
    units = [unit.label for unit in trained.optimizer._runtime.units]
    return issued, dmuon.plan(trained.model).to_json(), units


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("node_copy", "lookahead"), [(True, 2), (False, 1)])
def test_a_predicted_step_issues_what_the_engine_issues(ranks, mesh, late, node_copy, lookahead):
    options = {**AHEAD, "node_copy": node_copy, "lookahead": lookahead, "late_updates": late}
    inventory = dmuon.inventory(make_gpt())
    inventory["training"] = {"outside_elements": 0, "outside_flops": 0}  # which FSDP2 moves, not the engine
    model = _plan.model_from_json(json.dumps(inventory))
    for rank, (issued, text, units) in enumerate(ranks.run(planned, mesh, schedule=options)):
        names = ["outside of Muon", *units]
        predicted = [
            (lane, kind, names[index] if what == "unit" else f"batch {index}")
            for lane, kind, what, index in _plan.issued(_plan.Plan.from_json(text), model, rank)
        ]
        assert predicted == issued
