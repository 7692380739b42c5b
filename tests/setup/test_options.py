"""Options have one default each, the engine's where it has them, and reach engine and planner unchanged."""

from __future__ import annotations

import inspect

import pytest
from dmuon._setup.options import STEP, AcrossRanks, Planning, step_options

import dmuon
from dmuon import _plan

SHOWN = {name: p.default for name, p in inspect.signature(dmuon.dedicate_params).parameters.items()}
OTHER = {
    "node_copy": False,
    "lookahead": 5,
    "max_units_in_flight": 3,
    "reshard_after_forward": False,
    "late_updates": True,
    "replicated": True,
}
GIVEN = {name: SHOWN[name] for name in OTHER}


def fields(native: object) -> dict[str, object]:
    named = {name: getattr(native, name) for name in dir(native) if not name.startswith("_")}
    return {name: value for name, value in named.items() if not callable(value)}


def test_what_is_said_nowhere_is_as_the_engine_has_it():
    assert fields(step_options(**GIVEN)) == fields(STEP) == fields(_plan.StepOptions())
    assert fields(step_options(**{**GIVEN, "reshard_after_forward": None})) == fields(STEP)
    assert Planning().layout_slack == _plan.PlanOptions().layout_slack


def test_engine_and_planner_have_one_opinion():
    engine, planner = _plan.StepOptions(), _plan.PlanOptions()
    assert {name: getattr(planner, name) for name in fields(engine)} == fields(engine)


def test_the_signature_shows_the_same_defaults():
    for kind in (Planning(), AcrossRanks()):
        for name in vars(kind).keys() & SHOWN.keys():
            assert SHOWN[name] == getattr(kind, name), name
    assert inspect.signature(dmuon.plan).parameters["strategy"].default == Planning().strategy
    muon, iteration = (inspect.signature(f).parameters for f in (dmuon.Muon, dmuon.orthogonalize))
    assert [muon[name].default for name in ("ns_coefficients", "ns_steps")] == ["polar_express", 5]
    assert [iteration[name].default for name in ("ns_coefficients", "ns_steps")] == ["polar_express", 5]


@pytest.mark.parametrize("name", OTHER)
def test_every_option_of_the_schedule_reaches_the_engine(name):
    changed = fields(step_options(**{**GIVEN, name: OTHER[name]}))
    implied = {"node_copy": False, "reshard_after_forward": False} if name == "replicated" else {}
    assert changed == {**fields(_plan.StepOptions()), **implied, name: OTHER[name]}


def test_every_option_of_planning_reaches_the_planner():
    planning = Planning(layout_slack=0.5, max_memory_bytes=1000)
    step = step_options(**{**GIVEN, "node_copy": False, "lookahead": 7})
    changed = {"layout_slack": 0.5, "max_memory_bytes": 1000}
    assert fields(planning.native(step)) == {**fields(_plan.PlanOptions()), **fields(step), **changed}
