"""`dmuon simulate`, by what it prints and writes, and by its errors."""

from __future__ import annotations

import json
import time

import pytest
from dmuon._command.main import main

from dmuon import _plan

TASK = ("simulate", "--model", "qwen2.5-7b", "--device", "a800-sxm4-80gb")


@pytest.fixture
def run(capsys):
    def run(*arguments, task=TASK):
        status = main([*task, *(str(argument) for argument in arguments)])
        printed = capsys.readouterr()
        assert status == 0, printed.err
        return printed.out

    return run


@pytest.fixture
def complaint(capsys):
    def complain(*arguments):
        assert main([str(argument) for argument in arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        return printed.err

    return complain


def figures(run, *arguments):
    return json.loads(run("--json", *arguments))


def test_a_step_is_shown_for_each_contender_with_its_waits(run):
    text = run("--mesh", "4x8", "--tokens", "8192")
    assert "qwen2.5-7b on 4x8, 8192 tokens" in text and "infiniband-200g" in text
    for contender in ("AdamW", "dmuon", "Muon-AG"):
        assert f"\n{contender} waits, ms: " in text
    assert "of 85.9 GB" in text


def test_devices_without_matrices_are_counted(run):
    # Of its 196 matrices no two have one owner, if there are 256.
    assert "60 of 256 devices own no matrix" in run("--mesh", "32x8")
    assert figures(run, "--mesh", "32x8")["devices_without_matrices"] == 60
    assert "own no matrix" not in run("--mesh", "4x8")


def test_json_has_what_the_table_has(run):
    found = figures(run, "--mesh", "4x8")
    adamw, dmuon = found["steps"]["AdamW"], found["steps"]["dmuon"]
    assert dmuon["over_adamw"] == dmuon["step_ms"] / adamw["step_ms"]
    assert f"{dmuon['step_ms']:10.1f}" in run("--mesh", "4x8")
    # The device decides, not its host: these are all of a step.
    parts = [*dmuon["phases_ms"].values(), dmuon["adamw_ms"], dmuon["beside_ms"]]
    assert dmuon["step_ms"] == pytest.approx(sum(parts))
    assert dmuon["update_ms"] * 8 < found["steps"]["Muon-AG"]["update_ms"]


@pytest.mark.parametrize(
    ("mesh", "slower", "faster"),
    [
        ("4x8", ("--inter-bandwidth", "100Gbit"), ("--inter-bandwidth", "200Gbit")),
        ("4x8", ("--lookahead", "0"), ()),
        ("4x8", ("--network", "ethernet-100g"), ()),
    ],
)
def test_predictions_move_the_right_way(run, mesh, slower, faster):
    steps = [figures(run, "--mesh", mesh, *options)["steps"]["dmuon"]["step_ms"] for options in (slower, faster)]
    assert steps[0] > steps[1] * 1.001


def test_no_node_copy_sends_more_between_nodes_and_keeps_less(run):
    kept, dropped = (figures(run, "--mesh", "4x8", *o)["steps"]["dmuon"] for o in ((), ("--no-node-copy",)))
    assert dropped["inter_bytes"] > kept["inter_bytes"] and dropped["memory_bytes"] < kept["memory_bytes"]


def test_meshes_are_swept_fast(run):
    begin = time.process_time()
    rows = figures(run, "--meshes", "1x8,2x8,4x8,8x8,16x8,32x8,64x8")
    assert [row["mesh"] for row in rows] == ["1 x 8", "2 x 8", "4 x 8", "8 x 8", "16 x 8", "32 x 8", "64 x 8"]
    updates = [row["steps"]["dmuon"]["update_ms"] for row in rows]
    assert updates == sorted(updates, reverse=True)
    assert time.process_time() - begin < 50  # ten times what it takes


def test_a_sweep_is_a_table(run):
    text = run("--meshes", "1x8,2x8", "--model", "llama-3-70b")
    assert text.startswith("llama-3-70b, ")
    assert text.count("!\n") == 2 and "(!: more than that)" in text
    assert "\n1 x 8 " in text and "\n2 x 8 " in text


def test_a_sweep_stands_in_columns_and_says_where_devices_own_nothing(run):
    text = run("--meshes", "1x8,32x8", "--tp", "2")
    head, one_node, most_nodes = text.splitlines()[3:6]
    assert head.index("ms") + 2 == len("32 x 4, tensor parallel 2") + 10  # where the first figures end, too
    assert len(head) == len(one_node) == len(most_nodes)
    assert "32 x 4, tensor parallel 2: 60 of 256 devices own no matrix" in text
    assert text.count("own no matrix") == 1


def test_a_trace_is_as_long_as_the_step(run, tmp_path):
    found = figures(run, "--mesh", "2x4", "--trace", tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    for pid, step in enumerate(found["steps"].values()):
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == pid]
        assert max(span["ts"] + span["dur"] for span in spans) == pytest.approx(1e3 * step["step_ms"], rel=0.02)
        assert sum(span["dur"] for span in spans if span["cat"] == "adamw") == pytest.approx(1e3 * step["adamw_ms"])


def test_pictures_and_traces_are_written(run, tmp_path):
    run("--mesh", "2x8", "--plot", tmp_path / "step.svg", "--trace", tmp_path / "step.json")
    assert (tmp_path / "step.svg").read_text().startswith("<?xml")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "AdamW",
        "dmuon",
        "Muon-AG",
    }
    assert any(event["name"] == "forward model.layers.3" for event in events)
    run("--meshes", "1x8,2x8", "--plot", tmp_path / "sweep.svg")
    assert (tmp_path / "sweep.svg").read_text().startswith("<?xml")


def test_tensor_parallelism_is_predicted_as_it_runs(run):
    found, whole = figures(run, "--mesh", "2x8", "--tp", "2"), figures(run, "--mesh", "2x8")
    assert found["mesh"] == "2 x 4, tensor parallel 2"
    for contender in ("dmuon", "Muon-AG"):  # slices travel in an update
        assert found["steps"][contender]["update_ms"] > whole["steps"][contender]["update_ms"]


def test_experts_that_one_column_alone_has_stay_there(run, tmp_path):
    """Each of 4 columns has 2 of 8 experts. They do not travel inside nodes, unlike a whole stack."""
    part = {"rows": 256, "cols": 512, "num_matrices": 2}
    parts = [{**part, "name": f"experts[{2 * i}:{2 * i + 2}]", "continues": i > 0} for i in range(4)]
    sent = {}
    for kind, matrices in {
        "divided": [{**one, "column": column} for column, one in enumerate(parts)],
        "whole": parts,
    }.items():
        model = {"schema_version": 1, "name": "moe", "description": "", "source": "", "stand_in": False}
        (tmp_path / kind).write_text(json.dumps(model | {"units": [{"unit": 0, "name": "", "matrices": matrices}]}))
        found = run("--inventory", tmp_path / kind, "--mesh", "2x4", "--json", task=["simulate"])
        sent[kind] = json.loads(found)["steps"]["dmuon"]
    assert sent["divided"]["intra_bytes"] == 0 < sent["whole"]["intra_bytes"]
    assert sent["divided"]["inter_bytes"] > 0


def test_somebody_who_waits_is_told_what_is_done(capsys, monkeypatch):
    monkeypatch.setattr("dmuon._command.simulate._PATIENCE_S", 0.0)
    assert main([*TASK, "--mesh", "4x8"]) == 0
    assert "dmuon: predicting steps on 4x8 ...\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*TASK,), "--mesh or --meshes"),
        ((*TASK, "--mesh", "1x8", "--meshes", "1x8"), "--mesh or --meshes"),
        ((*TASK, "--mesh", "1x8", "--tokens", "0"), "--tokens: expected a whole number from 1"),
        ((*TASK, "--mesh", "1x8", "--network", "string"), "--network: expected one of"),
        ((*TASK, "--meshes", "1x8,2y8"), "--meshes: expected nodes x GPUs"),
        ((*TASK, "--mesh", "1x8", "--tp", "2", "--rule", "normuon"), "--rule: expected muon under tensor parallelism"),
        ((*TASK, "--mesh", "64x64"), "--mesh: expected at most 2048 GPUs"),
        ((*TASK, "--meshes", "1x8,2x8", "--trace", "t.json"), "--trace: expected --mesh"),
        ((*TASK, "--mesh", "1x8", "--plot", "a.svg", "--trace", "a.svg"), "two files"),
        (("simulate", "--model", "qwen2.5-7b", "--mesh", "1x8", "--device", "b300"), "--device: expected one of"),
        (("simulate", "--mesh", "1x8"), "--model or --inventory"),
        (("simulate", "--paper", "--tokens", "1"), "--paper: expected at most --json beside it; got --tokens"),
    ],
)
def test_bad_arguments_are_named(complaint, arguments, words):
    assert words in complaint(*arguments)


def test_measured_costs_go_with_the_device_that_trains(run, tmp_path):
    costs = json.loads(_plan.modelled_costs(_plan.model("qwen2.5-7b").inventory, "h200-sxm5-141gb").to_json())
    (tmp_path / "costs.json").write_text(json.dumps(costs | {"source": "measured"}))
    found = figures(run, "--mesh", "1x8", "--costs", tmp_path / "costs.json")
    assert found["costs"] == "measured" and found["device"] == "a800-sxm4-80gb"


def test_a_model_without_matrices_is_refused(complaint, tmp_path):
    empty = {"schema_version": 1, "name": "e", "description": "", "source": "", "stand_in": False, "units": []}
    (tmp_path / "empty.json").write_text(json.dumps(empty))
    assert "a model with a matrix" in complaint("simulate", "--inventory", tmp_path / "empty.json", "--mesh", "1x8")


def test_the_paper_is_told_by_the_command(capsys):
    assert main(["simulate", "--paper"]) == 0
    assert "Qwen2.5-7B" in capsys.readouterr().out
