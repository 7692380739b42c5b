"""The command `dmuon`, by what it prints and by its exit status. Long: every subcommand and option is here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from dmuon._command.main import main
from dmuon._doctor import examine
from dmuon._planning import milp

from dmuon import _plan

COMMANDS = ("plan", "compare", "simulate", "models", "tune", "doctor")
INVENTORY = {
    "schema_version": 1,
    "name": "small",
    "description": "two layers",
    "source": "by hand",
    "stand_in": False,
    "units": [
        {
            "name": "layers.{}",
            "repeat": 2,
            "matrices": [{"name": "up", "rows": 8, "cols": 4}, {"name": "down", "rows": 4, "cols": 4}],
        }
    ],
}
COSTS = {
    "schema_version": 1,
    "source": "by hand",
    "shapes": [
        {"rows": 8, "cols": 4, "batches": [{"size": 1, "ns": 900_000}]},
        {"rows": 4, "cols": 4, "batches": [{"size": 1, "ns": 500_000}, {"size": 2, "ns": 600_000}]},
    ],
}


@pytest.fixture
def succeeds(capsys):
    """Runs the command, which says nothing on stderr; gives what it prints."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert (status, printed.err) == (0, "")
        return printed.out

    return run


@pytest.fixture
def complains(capsys):
    """Runs the command, which says one line on stderr that has the words, nothing on stdout, and fails."""

    def run(words, *arguments):
        assert main([str(argument) for argument in arguments]) == 2, arguments
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("dmuon: ") and printed.err.endswith("\n") and printed.err.count("\n") == 1
        assert words in printed.err
        return printed.err

    return run


@pytest.fixture
def file(tmp_path):
    def write(name, value):
        path = tmp_path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return write


@pytest.fixture
def small(file):
    """A model of four matrices, on one node of two."""
    costs, inventory = file("costs.json", COSTS), file("inventory.json", INVENTORY)
    return ("--inventory", inventory, "--costs", costs, "--mesh", "1x2")


# Plans.


def test_a_plan_twice_is_the_same_bytes(succeeds):
    arguments = ("plan", "--model", "qwen2.5-vl-3b", "--mesh", "3x5", "--json")
    assert succeeds(*arguments) == succeeds(*arguments)
    arguments = ("plan", "--model", "pi0", "--mesh", "2x8", "--device", "a800-sxm4-80gb")
    assert succeeds(*arguments) == succeeds(*arguments)


def test_json_is_what_is_saved_and_has_the_figures(succeeds, small, tmp_path):
    text = succeeds("plan", *small, "--json", "--save", tmp_path / "plan.json")
    assert text == (tmp_path / "plan.json").read_text()
    plan = json.loads(text)
    assert plan["makespan_ms"] == 1.4
    assert plan["bound_ms"] == pytest.approx(1.4, abs=0.002)
    assert [one["name"] for one in plan["assignments"]][:2] == ["layers.0.up", "layers.0.down"]
    assert len(plan["loads_ms"]) == len(plan["memory_bytes"]) == 2


def test_the_table_shows_what_was_planned(succeeds, small):
    text = succeeds("plan", *small)
    assert "small on 1x2\n" in text and "costs: by hand\n" in text and "makespan 1.400 ms" in text


@pytest.mark.parametrize("rate", ["1Gbit", "1000 mbit", "1gbit/s"])
def test_a_bandwidth_shows_the_time_between_nodes_and_saves_the_plan_alone(succeeds, tmp_path, rate):
    arguments = ("plan", "--model", "qwen2.5-7b", "--mesh", "2x2")
    file = tmp_path / "plan.json"
    plan = json.loads(succeeds(*arguments, "--inter-bandwidth", rate, "--json", "--save", file))
    wire = plan.pop("wire")
    assert plan == json.loads(file.read_text()) == json.loads(succeeds(*arguments, "--json"))
    elements = sum(one["rows"] * one["cols"] for one in plan["assignments"])
    assert wire["bytes_per_s"] == 125e6
    assert wire["bound_ms"] == pytest.approx(elements * (2 + 4) / 2 / 125e6 * 1e3)
    expected = _plan.Plan.from_json(file.read_text()).wire_time(125e6)
    assert (wire["publish_ms"], wire["route_ms"]) == (expected.publish_ms, expected.route_ms)
    shown = f"weights {wire['publish_ms']:.3f} ms and gradients {wire['route_ms']:.3f} ms a step, together at least"
    assert shown in succeeds(*arguments, "--inter-bandwidth", rate)
    assert "each way" not in succeeds(*arguments)


@pytest.mark.parametrize("rate", ["1", "1GB", "0Gbit", "-1Gbit", "1Gibit", "1e3Gbit", "Gbit", "1Gbit extra"])
def test_a_bandwidth_is_bits_a_second(complains, rate):
    complains(
        "--inter-bandwidth: expected bits a second such as",
        "plan",
        "--model",
        "pi0",
        "--mesh",
        "2x2",
        f"--inter-bandwidth={rate}",
    )


@pytest.mark.parametrize(("name", "begin"), [("plan.svg", b"<?xml"), ("plan.PNG", b"\x89PNG")])
def test_a_picture_is_drawn_in_the_format_of_its_ending(succeeds, small, tmp_path, name, begin):
    succeeds("plan", *small, "--plot", tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begin)


def test_a_picture_never_takes_the_place_of_the_plan_or_of_another_format(complains, small, tmp_path):
    complains("two files", "plan", *small, "--plot", tmp_path / "a.svg", "--save", tmp_path / "." / "a.svg")
    complains("--plot: expected a file that ends in", "plan", *small, "--plot", tmp_path / "plan.txt")
    assert not {"a.svg", "plan.txt"} & {path.name for path in tmp_path.iterdir()}


def test_a_picture_without_matplotlib_is_refused_with_what_to_install(complains, small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    complains("pip install 'dmuon[examples]'", "plan", *small, "--plot", tmp_path / "plan.svg")


def test_compare_draws_no_picture_and_says_so(complains):
    error = complains("--plot", "compare", "--model", "pi0", "--mesh", "8", "--plot", "plan.svg")
    assert "unrecognized arguments" in error


def test_a_stand_in_says_so(succeeds):
    assert "stand-in" in succeeds("plan", "--model", "wall-wm", "--mesh", "8", "--strategy", "rank0")


def test_too_little_memory_is_answered_with_a_number_that_does(succeeds, complains):
    arguments = ("plan", "--model", "qwen2.5-7b", "--mesh", "2x4", "--strategy", "lpt", "--max-memory")
    enough = int(complains("plan: --max-memory must be", *arguments, "1GB").split(">= ")[1].split()[0])
    succeeds(*arguments, enough)
    plan = json.loads(succeeds(*arguments, enough, "--json"))
    assert max(plan["memory_bytes"]) + 2 * 1024**3 <= enough  # in reserve on a GPU
    complains("--max-memory", *arguments, enough // 2)
    on_cpu = int(complains("--max-memory", *arguments, "1GB", "--device", "cpu").split(">= ")[1].split()[0])
    on_cpu_plan = json.loads(succeeds(*arguments, on_cpu, "--device", "cpu", "--json"))
    assert max(on_cpu_plan["memory_bytes"]) == on_cpu


def test_a_plan_counts_the_state_of_its_rule(succeeds, complains, tmp_path):
    def plan(*arguments):
        on_cpu = ("--model", "pi0", "--mesh", "1", "--device", "cpu")
        return json.loads(succeeds("plan", *on_cpu, "--save", tmp_path / "plan.json", "--json", *arguments))

    muon, normuon, adamuon = (plan("--rule", rule) for rule in ("muon", "normuon", "adamuon"))
    elements = sum(one["rows"] * one["cols"] * one.get("num_matrices", 1) for one in muon["assignments"])
    neurons = sum(one["rows"] * one.get("num_matrices", 1) for one in muon["assignments"])
    assert plan() == muon and "rule" not in muon["options"]
    assert adamuon["options"]["rule"] == "adamuon"
    # Beside state, the update of a batch takes fp32 copies.
    assert adamuon["memory_bytes"][0] - muon["memory_bytes"][0] >= 4 * elements
    assert 4 * neurons <= normuon["memory_bytes"][0] - muon["memory_bytes"][0] < 4 * elements
    plan("--rule", "adamuon")
    assert succeeds("compare", tmp_path / "plan.json", tmp_path / "plan.json")
    complains("--rule: expected one of muon, normuon, adamuon; got 'shampoo'", "plan", "--rule", "shampoo")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1GB", 10**9),
        ("80gb", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("1.5g", 15 * 10**8),
        ("2Ti", 2**41),
        ("640kB", 640_000),
        ("123456789", 123456789),
        ("0", 0),
    ],
)
def test_sizes_may_have_units(succeeds, small, text, value):
    on_cpu = (*small[:2], "--mesh", "1x2", "--device", "cpu")  # which needs no reserve
    plan = json.loads(succeeds("plan", *on_cpu, "--json", "--max-memory", text))
    assert plan["options"]["max_memory_bytes"] == value


@pytest.mark.parametrize("text", ["80 parsecs", "-5", "", "GB", "1e9", "1.GB", "99999999999GB", "9223372036854775808"])
def test_other_sizes_are_refused(complains, small, text):
    complains("--max-memory: expected bytes such as 80GB", "plan", *small, f"--max-memory={text}")


def test_memory_is_that_of_the_device(succeeds):
    arguments = ("plan", "--model", "pi0", "--mesh", "2x2", "--strategy", "rank0", "--json", "--device")
    gpu, cpu = (json.loads(succeeds(*arguments, device)) for device in ("h100-sxm5-80gb", "cpu"))
    assert (gpu["options"]["on_cpu"], cpu["options"]["on_cpu"]) == (False, True)
    assert cpu["memory_bytes"][0] > gpu["memory_bytes"][0]  # an inbox


def test_options_reach_the_plan(succeeds, small):
    options = ("--lookahead", "0", "--layout-slack", "0.25", "--no-node-copy")
    found = json.loads(succeeds("plan", *small, "--json", *options))["options"]
    assert (found["lookahead"], found["layout_slack"], found["node_copy"]) == (0, 0.25, False)
    found = json.loads(succeeds("plan", *small, "--json"))["options"]
    assert (found["lookahead"], found["layout_slack"], found["node_copy"]) == (2, 0.03, True)


# Meshes.


@pytest.mark.parametrize(("text", "sides"), [("2x8", (2, 8)), ("8", (1, 8)), ("16x4", (16, 4))])
def test_a_mesh_is_nodes_by_gpus_or_gpus(succeeds, text, sides):
    mesh = json.loads(succeeds("plan", "--model", "pi0", "--strategy", "rank0", "--mesh", text, "--json"))["mesh"]
    assert mesh == {"num_replicates": sides[0], "num_shards": sides[1], "tensor_parallel": 1}


OTHER_MESHES = ("", "x", "2x", "x8", "0x8", "8x0", "2y8", "2x8x2", "-2x8", "+2x8", "2 x 8", " 2x8", "2x8 ", "2X8")


@pytest.mark.parametrize("text", [*OTHER_MESHES, "99999999999x8", "1.5x8", "0", "-1", "1e3"])
def test_any_other_mesh_is_refused(complains, text):
    for command in ("plan", "compare"):
        complains("--mesh: expected nodes x GPUs a node", command, "--model", "pi0", f"--mesh={text}")


@pytest.mark.parametrize(("mesh", "tp"), [("1048576x8", "1"), ("4097x8", "2")])
def test_a_mesh_beyond_what_is_planned_in_seconds_is_refused(complains, mesh, tp):
    words = f"--mesh: expected at most 32768 GPUs (nodes x GPUs a node), got {mesh}"
    complains(words, "plan", "--model", "pi0", "--mesh", mesh, "--tp", tp, "--strategy", "rank0")


def test_the_largest_mesh_is_planned(succeeds):
    succeeds("plan", "--model", "pi0", "--mesh", "4096x8", "--tp", "2", "--strategy", "rank0")


def test_tensor_parallel_groups_are_gpus_of_a_node(succeeds):
    arguments = ("plan", "--model", "pi0", "--mesh", "2x8", "--tp", "2", "--strategy", "rank0", "--json")
    plan = json.loads(succeeds(*arguments))
    assert plan["mesh"] == {"num_replicates": 2, "num_shards": 4, "tensor_parallel": 2}
    assert len(plan["loads_ms"]) == 16
    assert all(matrix["tensor_parallel"] for matrix in plan["assignments"])


def test_groups_that_do_not_fit_into_a_node_ask_what_is_meant(complains):
    error = complains("--tp", "plan", "--model", "pi0", "--mesh", "2x8", "--tp", "3")
    assert "expected a divisor of the 8 GPUs of a node, got 3" in error
    assert "--mesh counts nodes x GPUs a node" in error
    assert "did you mean 8 groups of 3 GPUs a node, a mesh of 2x24?" in error
    complains("--tp: expected a whole number from 1", "plan", "--model", "pi0", "--mesh", "8", "--tp", "0")


# Names.


def test_names_may_be_typed_in_any_case(succeeds):
    arguments = ("--model", "qwen2.5-7B", "--mesh", "4", "--device", "H100-SXM5-80GB", "--strategy", "RANK0")
    assert "qwen2.5-7b on 1x4\nstrategy rank0" in (text := succeeds("plan", *arguments))
    assert "model of h100-sxm5-80gb" in text


@pytest.mark.parametrize(
    ("option", "typed", "meant"),
    [
        ("--device", "h100", "h100-sxm5-80gb"),
        ("--device", "a100-sxm4-80g", "a100-sxm4-80gb"),
        ("--device", "sxm4", "a800-sxm4-80gb or a100-sxm4-80gb"),
        ("--model", "qwen2.5-7", "qwen2.5-7b"),
        ("--model", "qwen25-7b", "qwen2.5-7b"),
        ("--strategy", "loadbalance", "load_balance"),
    ],
)
def test_another_name_gets_the_nearest(complains, option, typed, meant):
    task = {"--model": "pi0", "--mesh": "8"} | {option: typed}
    error = complains(f"{option}: expected one of ", "plan", *(word for pair in task.items() for word in pair))
    assert f"; got {typed!r}; did you mean {meant}" in error


def test_a_name_that_is_near_to_none_gets_the_list(complains):
    error = complains(
        "--device: expected one of a800-sxm4-80gb, ", "plan", "--model=pi0", "--mesh=8", "--device=abacus"
    )
    assert "did you mean" not in error
    complains("milp", "plan", "--model", "pi0", "--mesh", "8", "--strategy", "zzz")


# Other commands.


def test_models_are_listed(succeeds):
    text = succeeds("models")
    table = Path(__file__).parents[2].joinpath("models", "README.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in table if line.startswith("| `")]
    listed = {line.split()[0]: line for line in text.splitlines()[1:-2]}
    assert listed.keys() == {row[1].strip("`") for row in rows}
    for row in rows:
        assert listed[row[1].strip("`")].split()[1] == row[2].replace(",", "")
    assert {"devices:", "a100-sxm4-80gb", "h200-sxm5-141gb", "cpu"} <= set(text.splitlines()[-2].split())
    assert {"networks:", "infiniband-200g", "ethernet-1g"} <= set(text.splitlines()[-1].split())
    found = json.loads(succeeds("models", "--json"))
    assert [model["name"] for model in found["models"]] == list(listed)
    assert [model["name"] for model in found["models"] if model["stand_in"]] == ["wall-wm"]
    assert found["models"][4]["elements"] == 6_525_288_448  # qwen2.5-7b, as tests/catalog has it
    assert "h200-sxm5-141gb" in found["devices"]
    assert "infiniband-400g" in found["networks"]


def test_compare_shows_all_strategies_but_the_slow_one(succeeds, small, monkeypatch):
    monkeypatch.setattr(milp, "solve", None)  # whoever calls it fails
    rows = json.loads(succeeds("compare", *small, "--json"))
    assert [row["strategy"] for row in rows] == ["load_balance", "lpt", "round_robin", "rank0", "xor_layout"]
    assert rows[0]["makespan_ms"] == min(row["makespan_ms"] for row in rows) == 1.4
    text = succeeds("compare", *small)
    assert all(f"{row['makespan_ms']:12.3f}" in text for row in rows)


def test_compare_shows_the_strategies_that_are_named(succeeds, small):
    rows = json.loads(succeeds("compare", *small, "--json", "--strategy", "milp", "--strategy", "rank0"))
    assert [(row["strategy"], row["makespan_ms"]) for row in rows] == [("milp", 1.4), ("rank0", 2.4)]


def test_saved_plans_are_compared(succeeds, complains, small, file, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    succeeds("plan", *small, "--save", first)
    succeeds("plan", *small, "--save", second, "--strategy", "rank0")
    assert "0 of 4 parameters have another owner" in succeeds("compare", first, first)
    text = succeeds("compare", first, second)
    assert f"1 x 2  rank0  {second}" in text
    assert "2 of 4 parameters have another owner" in text and text.count(": owner 1 -> 0\n") == 2
    complains("two files of plans", "compare", first)
    complains("files and --mesh", "compare", first, second, "--mesh", "2")
    complains("files and --lookahead, --json", "compare", first, second, "--json", "--lookahead", "0")
    complains("expected two files of plans, got 3", "compare", first, second, first)
    complains("schema_version", "compare", first, tmp_path / "costs.json")
    broken = file("broken.json", "{")
    for arguments in ((first, broken), (broken, first)):
        assert str(broken) in complains("expected JSON; parse error at line 1", "compare", *arguments)


def test_plans_of_two_meshes_are_compared_but_not_their_owners(succeeds, small, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    succeeds("plan", *small, "--save", first)
    succeeds("plan", *small[:-1], "2x2", "--save", second)
    text = succeeds("compare", first, second)
    assert f"  1 x 2  load_balance  {first}\n" in text and f"  2 x 2  load_balance  {second}\n" in text
    assert text.endswith("owners are not compared: the meshes differ\n") and "->" not in text


def test_plans_of_two_models_are_refused(succeeds, complains, small, file, tmp_path):
    wider = json.loads(json.dumps(INVENTORY).replace('"cols": 4', '"cols": 8', 1))
    other = file("wider.json", wider)
    succeeds("plan", *small, "--save", tmp_path / "a.json")
    succeeds("plan", "--inventory", other, "--mesh", "2", "--save", tmp_path / "b.json")
    complains("parameter 0: expected 'layers.0.up', 8 x 4", "compare", tmp_path / "a.json", tmp_path / "b.json")


def test_of_many_moves_some_are_shown(succeeds, tmp_path):
    plans = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, strategy in zip(plans, ("rank0", "round_robin"), strict=True):
        succeeds("plan", "--model", "qwen2.5-7b", "--mesh", "2", "--save", path, "--strategy", strategy)
    text = succeeds("compare", *plans)
    moved = int(text.splitlines()[-1].split()[0])
    assert text.count(" -> ") == 10 and f"... and {moved - 10} more\n" in text


def test_help_has_examples_that_work_as_typed(succeeds, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examine, "_SECTIONS", ())  # test_doctor.py has them
    succeeds("plan", "--model", "pi0", "--mesh", "4", "--save", "a.json")
    succeeds("plan", "--model", "pi0", "--mesh", "4", "--save", "b.json", "--strategy", "lpt")
    for arguments in ([], *([command] for command in COMMANDS)):
        text = " ".join(succeeds(*arguments, "--help").split())
        examples = text.partition("Example")[2].partition(": ")[2].split("; ")
        assert examples != [""]
        for example in examples:
            program, *typed = example.split()
            assert program == "dmuon"
            succeeds(*typed)
    assert (tmp_path / "plan.json").exists() and (tmp_path / "plan.svg").exists()
    assert all(command in succeeds("--help") for command in COMMANDS)


def test_the_version_is_the_projects(succeeds):
    listed = Path(__file__).parents[2].joinpath("CMakeLists.txt").read_text()
    assert f"VERSION {succeeds('--version').strip()} " in listed


# The paper's MILP.


@pytest.fixture
def scipy_answers(monkeypatch):
    scipy = pytest.importorskip("scipy.optimize")
    return lambda answer: monkeypatch.setattr(scipy, "milp", lambda *_, **__: answer)


def test_what_the_milp_did_not_prove_is_said_beside_the_plan(small, scipy_answers, capsys, caplog):
    # x[kind, owner] of the three kinds of batches, then the makespan: one of each shape for each owner.
    scipy_answers(SimpleNamespace(x=[1, 1, 1, 1, 0, 0, 1.4], status=1, message="Time limit reached."))
    assert main([*map(str, ("plan", *small)), "--strategy", "milp", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategy"] == "milp"
    assert "milp: not proved optimal" in caplog.text


def test_a_milp_in_vain_leaves_it_to_load_balance_and_compare_says_so(small, scipy_answers, capsys, caplog):
    scipy_answers(SimpleNamespace(x=None, status=1, message="Time limit reached."))
    arguments = [*map(str, ("compare", *small)), "--strategy", "milp", "--strategy", "rank0"]
    assert main(arguments) == 0
    assert "milp          found no plan of its own; load_balance decided\n" in capsys.readouterr().out
    assert "Time limit reached" in caplog.text


def test_without_scipy_the_error_says_what_to_install(complains, small, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    complains("pip install 'dmuon[milp]'", "plan", *small, "--strategy", "milp")


def test_a_milp_over_tensor_parallelism_takes_its_times(succeeds, small):
    arguments = (*small[:2], "--mesh", "2", "--tp", "2", "--strategy", "milp", "--strategy", "lpt", "--json")
    milp_row, lpt_row = json.loads(succeeds("compare", *arguments))
    assert milp_row["bound_ms"] <= milp_row["makespan_ms"] <= lpt_row["makespan_ms"] * 1.0001


# Bad input.


def test_bad_input_is_answered_in_one_line_that_names_it(complains, small):
    model = ("--model", "pi0", "--mesh", "8")
    complains("--lookahead", "plan", *model, "--lookahead", "-1")
    for value in ("1.5", "much", "nan", "-0.1"):
        complains("--layout-slack: expected a number from 0 to 1", "plan", *model, f"--layout-slack={value}")
    complains("--model or --inventory", "plan", *model, "--inventory", small[1])
    complains("--model or --inventory", "plan", "--mesh", "8")


def test_bad_arguments_are_answered_in_one_line(complains, small):
    complains("plan, compare, simulate, models, tune or doctor")
    complains("plans", "plans")
    complains("--mesh", "plan", "--model", "pi0")
    complains("--mesh", "compare", "--model", "pi0")
    complains("--mesh", "plan", "--model", "pi0", "--mesh")
    complains("--colour", "plan", *small, "--colour", "red")
    complains("--lay", "plan", *small, "--lay", "0.1")  # options are not abbreviated: a new one could not come
    complains("extra", "models", "extra")


def test_bad_files_are_answered_in_one_line_that_names_them(complains, small, file, tmp_path):
    binary = tmp_path / "binary.json"
    binary.write_bytes(bytes(range(256)))
    for path in (tmp_path / "missing.json", file("empty.json", ""), tmp_path, file("text.json", "no {J\n\n"), binary):
        complains(f"--inventory: cannot read '{path}'", "plan", "--inventory", path, "--mesh", "8")
        complains(f"--costs: cannot read '{path}'", "plan", "--inventory", small[1], "--costs", path, "--mesh", "8")
        complains(f"plan: cannot read '{path}'", "compare", path, path)


def test_costs_that_lack_a_shape_or_are_a_plan_say_so(complains, small, file):
    lacking = file("lacking.json", COSTS | {"shapes": COSTS["shapes"][:1]})
    words = "/lacking.json': costs: expected an entry for shape 4 x 4"
    complains(words, "plan", "--inventory", small[1], "--costs", lacking, "--mesh", "8")
    complains("/lacking.json'", "plan", "--inventory", small[1], "--costs", lacking, "--mesh", "8", "--tp", "2")
    plan = file("plan.json", {"assignments": []})
    words = "/plan.json': costs: expected a table of costs, as a plan has it under 'costs'; got a plan"
    complains(words, "plan", "--inventory", small[1], "--costs", plan, "--mesh", "8")


def test_files_that_cannot_be_written_are_named(complains, small, tmp_path):
    for path in (tmp_path / "missing" / "plan.json", tmp_path, Path("/dev/full")):
        complains(f"cannot write '{path}'", "plan", *small, "--save", path)
    path = tmp_path / "missing" / "plan.svg"
    complains(f"cannot write '{path}'", "plan", *small, "--plot", path)
