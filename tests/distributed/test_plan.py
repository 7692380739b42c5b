"""Plans as training uses them: by every strategy, saved, loaded, limited, with options; and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import make_gpt
from plans import error, plan_json, saved, started
from pool import TEST_DEVICE
from scenario import Session, check
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training import AHEAD, KEPT, NO_COPY, dedicate, shard

import dmuon

SHAPES = {(72, 24): 900, (24, 24): 500, (41, 24): 700, (24, 41): 800}  # and nanoseconds


def planned(s: Session, strategy: str) -> None:
    s.start(make_gpt(), options={"strategy": strategy})
    s.train(0, 1, 2, 3)


@pytest.mark.parametrize(("strategy", "schedule"), [("milp", AHEAD), ("lpt", NO_COPY), ("xor_layout", KEPT)])
def test_every_strategy_trains_to_the_same_weights(ranks, strategy, schedule):
    check(ranks, planned, schedule=schedule, strategy=strategy)


def test_a_saved_plan_is_loaded_as_it_was(ranks, tmp_path):
    path = tmp_path / "plan.json"
    owners = ranks.run(saved, (2, 2), path=str(path), strategy="round_robin")
    loaded = [json.loads(text) for text in ranks.run(plan_json, (2, 2), plan=str(path))]
    assert all(plan == json.loads(path.read_text()) for plan in loaded)
    assert [a["owner"] for a in loaded[0]["assignments"]] == owners[0]
    assert dmuon.Plan.load(path).owner == owners[0]


WRAPPERS = {
    "checkpoints": checkpoint_wrapper,
    "compile": lambda block: torch.compile(block, backend="eager"),
    "both": lambda block: checkpoint_wrapper(torch.compile(block, backend="eager")),
}


def owners_under(mesh: Any, wrapper: str, inner: bool, **options: Any) -> list[int]:
    """Of a model whose blocks, or layers in blocks, are wrapped; options as for dedicate_params."""
    model = make_gpt()
    if inner:
        for block in model.blocks:
            block.up = WRAPPERS[wrapper](block.up)
    else:
        model.blocks = nn.ModuleList(map(WRAPPERS[wrapper], model.blocks))
    dedicate(model, mesh, AHEAD, **options)
    shard(model, mesh)
    return dmuon.Muon(model, ns_dtype=torch.float32).plan.owner


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("inner", [False, True])
def test_a_plan_is_for_the_same_model_under_wrappers_too(ranks, tmp_path, wrapper, inner):
    path = str(tmp_path / "plan.json")
    owners = ranks.run(saved, (2, 2), path=path, strategy="xor_layout")
    assert ranks.run(owners_under, (2, 2), wrapper=wrapper, inner=inner, plan=path) == owners
    assert len(set(owners[0])) > 1


def test_a_plan_for_something_else_is_refused_with_the_first_difference(ranks, tmp_path):
    path = str(tmp_path / "plan.json")
    ranks.run(saved, (2, 2), path=path)
    for message in ranks.run(error, (4,), plan=path):
        assert "mesh: expected 1 x 4 x 1, the plan is for 2 x 2 x 1" in message
    for message in ranks.run(error, (2, 2), plan=path, depth=2):
        assert "expected 8 parameters; the plan has 12" in message
    for message in ranks.run(error, (2, 2), plan=path, select=out_is_adamws):
        assert (
            "parameter 1: expected 'blocks.0.up.weight', 41 x 24, unit 0; the plan has 'blocks.0.out.weight'" in message
        )


def out_is_adamws(name: str, *_: Any) -> bool | None:
    return False if "out" in name else None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"plan": "/nowhere/plan.json"}, ["plan", "/nowhere/plan.json"]),
        ({"costs": "/nowhere/costs.json"}, ["costs", "/nowhere/costs.json"]),
        ({"strategy": "best"}, ["strategy", "load_balance", "milp", "'best'"]),
        ({"layout_slack": -0.1}, ["layout_slack", "-0.1"]),
        ({"max_memory_bytes": 0}, ["max_memory_bytes", "got 0"]),
        ({"costs": 3}, ["costs", "got 3"]),
    ],
    ids=str,
)
def test_bad_options_raise_on_every_rank(ranks, options, words):
    for message in ranks.run(error, (2, 2), **options):
        assert all(word in message for word in words), message


def table_for(path: Path, times: dict[tuple[int, int], int]) -> None:
    """A table of costs with single matrices only."""
    shapes = [{"rows": r, "cols": c, "batches": [{"size": 1, "ns": ns}]} for (r, c), ns in times.items()]
    path.write_text(json.dumps({"schema_version": 1, "source": "a test", "shapes": shapes}))


def test_a_table_that_lacks_a_shape_is_named(ranks, tmp_path):
    path = tmp_path / "costs.json"
    table_for(path, {shape: ns for shape, ns in SHAPES.items() if shape != (24, 41)})
    for message in ranks.run(error, (2, 2), costs=str(path)):
        assert "24 x 41" in message
    table_for(path, SHAPES)
    plan = json.loads(ranks.run(plan_json, (2, 2), costs=str(path))[0])
    assert plan["costs"]["source"] == "a test"
    assert sum(plan["loads_ms"]) == pytest.approx(3 * sum(SHAPES.values()) / 1e6)


def test_a_memory_limit_is_kept_or_one_that_would_do_is_named(ranks):
    (message, *others) = ranks.run(error, (2, 2), max_memory_bytes=1000, costs="modelled")
    assert others == [message] * 3
    enough = int(message.split(">= ")[1].split()[0])
    plan = json.loads(ranks.run(plan_json, (2, 2), max_memory_bytes=enough, costs="modelled")[0])
    assert max(plan["memory_bytes"]) <= enough


@pytest.fixture
def path(ranks, tmp_path):
    """Of a saved plan for 2 x 2 ranks."""
    path = str(tmp_path / "plan.json")
    ranks.run(saved, (2, 2), path=path)
    return path


@pytest.mark.parametrize(
    "options", [{"strategy": "rank0"}, {"costs": "costs.json"}, {"layout_slack": 0.5, "strategy": "lpt"}], ids=str
)
def test_what_decides_a_plan_is_refused_beside_one_on_every_rank(ranks, path, options):
    messages = ranks.run(error, (2, 2), plan=path, **options)
    assert len(set(messages)) == 1
    for name, value in options.items():
        assert name in messages[0] and repr(value) in messages[0]
    assert messages[0].startswith("dedicate_params: plan: expected no ")


def error_where_one_differs(mesh: Any, here: dict[str, Any], **options: Any) -> str:
    """Slot 1 has options of its own."""
    try:
        started(mesh, **options | (here if mesh.get_rank() == 1 else {}))
    except ValueError as raised:
        return str(raised)
    return ""


def test_ranks_that_differ_in_it_all_raise(ranks, path):
    messages = ranks.run(error_where_one_differs, (2, 2), plan=path, here={"strategy": "rank0"})
    assert all("ranks differ" in message for message in messages)


def test_a_loaded_plan_may_not_exceed_max_memory_bytes(ranks, path):
    least = max(dmuon.Plan.load(path).memory_bytes)
    if TEST_DEVICE != "cpu":
        least += 2 * 1024**3  # in reserve
    for message in ranks.run(error, (2, 2), plan=path, max_memory_bytes=least - 1):
        assert f"max_memory_bytes: expected >= {least}" in message
        assert path in message and f"got {least - 1}" in message
    assert ranks.run(error, (2, 2), plan=path, max_memory_bytes=least) == [""] * 4


def error_of_plan(mesh: Any, given: dict[str, Any]) -> str:
    """What `dmuon.plan` says to options for a model with Muon; without, it gives its plan."""
    model, opt = started(mesh)
    assert dmuon.plan(model) is opt.plan
    try:
        dmuon.plan(model, **given)
    except ValueError as raised:
        return str(raised)
    return ""


@pytest.mark.parametrize("options", [{"mesh": (1, 2)}, {"strategy": "lpt", "costs": "costs.json"}], ids=str)
def test_a_model_with_muon_has_its_plan_and_no_other(ranks, options):
    for message in ranks.run(error_of_plan, (2, 2), given=options):
        assert message.startswith(f"plan: {', '.join(options)}: expected none for a model that dmuon.Muon has planned")
        assert all(repr(value) in message for value in options.values())
