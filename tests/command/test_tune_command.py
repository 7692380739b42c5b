"""`dmuon tune`: what it prints and keeps, and what it refuses."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch
from dmuon._command.arguments import parser
from dmuon._command.main import main
from dmuon._planning import tuning
from dmuon._setup.hyperparameters import NS_COEFFICIENTS, NS_STEPS

CHOICE = r"(cpu|avx512), (direct|gram)(, batched)?(, panels of \d+)?"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_POOL_ELEMENTS", 1 << 16)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def dmuon(capsys):
    """Runs the command; gives its status, output and errors."""

    def run(*arguments):
        return (main([str(argument) for argument in arguments]), *capsys.readouterr())

    return run


def tune(dmuon, *arguments):
    status, out, err = dmuon("tune", "--threads", 1, "--budget", 5, *arguments)
    assert (status, err) == (0, "")
    return out


def test_a_table_is_printed_kept_and_shown(dmuon, monkeypatch):
    out = tune(dmuon, "--shapes", "16x16,9*12x30", "--dtype", "fp32")
    title, head, *rows = out.splitlines()
    assert ", 1 thread, float32, 5 steps from (7.893, " in title and f"PyTorch {torch.__version__}" in title
    assert head.split() == ["shape", "default", "chosen", "default", "ms", "chosen", "ms", "ratio", "error"]
    assert [row.split()[0] for row in rows] == ["8*16x16", "9*12x30"]
    for row in rows:
        assert re.fullmatch(rf"\S+ +{CHOICE} +{CHOICE}( +\d+\.\d+){{3}} +\d\.\de-\d\d", row)
    (row,) = tune(dmuon, "--shapes", "256x256", "--dtype", "fp32").splitlines()[2:]
    assert re.fullmatch(rf"256x256 +{CHOICE} +{CHOICE}( +[\d.e-]+){{4}}", row) and ", panels of " in row
    monkeypatch.setattr(tuning, "_measure", None)  # it is not timed again
    assert tune(dmuon, "--shapes", "16x16,9*12x30", "--dtype", "fp32") == out
    assert sorted(dmuon("tune", "--show")[1].splitlines()) == sorted([*out.splitlines(), row])


def test_json_has_what_is_kept(dmuon):
    found = json.loads(tune(dmuon, "--shapes", "16x16", "--json", "--coefficients", "quintic", "--steps", 3))
    assert found["key"]["threads"] == 1 and len(found["key"]["ns_coefficients"]) == 3
    assert [(one["number"], one["rows"], one["cols"]) for one in found["choices"]] == [(8, 16, 16)]
    assert found["not_tuned"] == [] and found["kept"]
    assert json.loads(dmuon("tune", "--show", "--json")[1]) == [{key: found[key] for key in ("key", "choices")}]


def test_what_could_not_be_kept_is_not_said_to_be(dmuon, monkeypatch):
    monkeypatch.setenv("DMUON_CACHE_DIR", "/proc/nowhere")
    assert not json.loads(tune(dmuon, "--shapes", "16x16", "--json"))["kept"]
    assert "nothing is kept: /proc/nowhere cannot be written (DMUON_CACHE_DIR)" in tune(dmuon, "--shapes", "16x16")


def test_a_models_shapes_are_those_of_its_inventory(dmuon, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(tuning, "tune", lambda shapes, setting, budget: (seen.extend(shapes), ([], {}))[1])
    matrices = [
        {"name": "up", "rows": 8, "cols": 4},
        {"name": "qkv", "rows": 4, "cols": 12, "column_blocks": 3},
        {"name": "experts", "rows": 6, "cols": 5, "num_matrices": 7},
    ]
    inventory = {"schema_version": 1, "name": "small", "description": "x", "source": "by hand", "stand_in": False}
    file = tmp_path / "inventory.json"
    file.write_text(json.dumps({**inventory, "units": [{"name": "layer", "matrices": matrices}]}))
    tune(dmuon, "--inventory", file)
    assert seen == [(1, 8, 4), (3, 4, 4), (7, 6, 5)]
    tune(dmuon, "--model", "pi0")
    assert len(seen) > 3


def test_what_the_budget_does_not_reach_is_said(dmuon):
    status, out, err = dmuon("tune", "--shapes", "16x16,1024x1024", "--threads", 1, "--budget", 0.5, "--dtype", "fp32")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "1024x1024: the default stays: not reached within the budget"


def test_nothing_is_kept_without_a_folder_and_that_is_said(dmuon, monkeypatch):
    monkeypatch.setenv("DMUON_CACHE_DIR", "")
    assert tune(dmuon, "--shapes", "16x16").endswith("nothing is kept: there is no folder for it (DMUON_CACHE_DIR)\n")
    assert dmuon("tune", "--show")[:2] == (0, "nothing is kept: there is no folder for it (DMUON_CACHE_DIR)\n")


def test_show_leaves_out_what_is_damaged_with_a_warning(dmuon, tmp_path, caplog):
    tune(dmuon, "--shapes", "16x16", "--dtype", "fp32")
    out = dmuon("tune", "--show")[1]
    (tmp_path / "cache" / "tuned" / "0.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert dmuon("tune", "--show")[1] == out
    assert caplog.text.count("tuned choices are not read from") == 1 and "0.json" in caplog.text
    (tmp_path / "cache" / "tuned" / "0.json").unlink()
    (file,) = (tmp_path / "cache" / "tuned").iterdir()
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"choices": [{"number": 1}, *content["choices"], None]}))
    with caplog.at_level(logging.WARNING):
        assert dmuon("tune", "--show")[1] == out
    assert caplog.text.count("tuned choices are not read from") == 2 and "KeyError: 'rows'" in caplog.text


SHAPES = ["--shapes", "8x8"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "tune: expected one of --shapes, --inventory, --model or --show; got none"),
        ([*SHAPES, "--show"], "--show; got --shapes and --show"),
        (
            ["--show", "--json", "--dtype", "fp32", "--budget", "3"],
            "tune: --show: expected at most --json beside it; got --budget, --dtype",
        ),
        (["--shapes", "8by8"], "--shapes: expected shapes such as 1024x4096,64*128x512; got '8by8'"),
        (["--shapes", "0x8"], "got '0x8'"),
        (["--shapes", "8x8,"], "got '8x8,'"),
        (["--shapes", ""], "got ''"),
        ([*SHAPES, "--steps", "0"], "--steps: expected a whole number from 1 to 99; got '0'"),
        ([*SHAPES, "--steps", "100"], "--steps: expected a whole number from 1 to 99; got '100'"),
        ([*SHAPES, "--threads", "none"], "--threads: expected a whole number from 1 to 1024; got 'none'"),
        ([*SHAPES, "--budget", "nan"], "--budget: expected seconds, more than 0 and at most 86400; got 'nan'"),
        ([*SHAPES, "--budget", "0"], "--budget: expected seconds, more than 0 and at most 86400; got '0'"),
        ([*SHAPES, "--dtype", "fp8"], "--dtype: expected one of bf16, fp16, fp32; got 'fp8'"),
        ([*SHAPES, "--coefficients", "express"], "'express'; did you mean polar_express?"),
        (["--model", "gpt"], "--model: expected one of"),
        (["--inventory", "/nowhere.json"], "--inventory: cannot read"),
    ],
)
def test_bad_arguments_are_answered_in_one_line(dmuon, arguments, words):
    status, out, err = dmuon("tune", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("dmuon: ") and err.count("\n") == 1 and words in err


def test_its_defaults_are_those_of_muon():
    found = parser().parse_args(["tune", *SHAPES])
    assert (found.coefficients, found.steps, found.dtype) == (NS_COEFFICIENTS, NS_STEPS, None)
