"""The command `dmuon` as a user meets it: bytes, exit codes, pipes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

# Of the build that runs this, else what is installed.
COMMAND = os.environ.get("DMUON_COMMAND") or shutil.which("dmuon")
COMMANDS = ("plan", "compare", "models")
MODELS = (
    "deepseek-v3",
    "kimi-k2",
    "llama-3-70b",
    "pi0",
    "qwen2.5-7b",
    "qwen2.5-vl-3b",
    "wall-oss-0.5",
    "wall-wm",
)
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


def dmuon(*arguments, **options):
    assert COMMAND is not None
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, timeout=120, check=False, **options)


@unittest.skipIf(COMMAND is None, "DMUON_COMMAND names no program, and none is installed")
class CommandTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.inventory = self.file("inventory.json", INVENTORY)
        self.costs = self.file("costs.json", COSTS)
        self.small = ("--inventory", self.inventory, "--costs", self.costs, "--mesh", "1x2")

    def file(self, name, value):
        path = self.folder / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    def succeeds(self, *arguments):
        result = dmuon(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, b"")
        return result.stdout.decode()

    def complains(self, named, *arguments):
        """One line on stderr that has the word, nothing on stdout, exit code 2."""
        with self.subTest(arguments=arguments):
            result = dmuon(*arguments)
            message = result.stderr.decode("ascii")
            self.assertEqual(result.returncode, 2, message)
            self.assertEqual(result.stdout, b"")
            self.assertEqual(message.count("\n"), 1, message)
            self.assertTrue(message.endswith("\n"), message)
            self.assertIn(named, message)
            return message

    # Plans.

    def test_a_plan_twice_is_the_same_bytes(self):
        arguments = ("plan", "--model", "qwen2.5-vl-3b", "--mesh", "3x5", "--json")
        self.assertEqual(self.succeeds(*arguments), self.succeeds(*arguments))
        arguments = ("plan", "--model", "pi0", "--mesh", "2x8", "--device", "a800-sxm4-80gb")
        self.assertEqual(self.succeeds(*arguments), self.succeeds(*arguments))

    def test_json_is_what_is_saved_and_has_the_figures(self):
        saved = self.folder / "plan.json"
        text = self.succeeds("plan", *self.small, "--json", "--save", saved)
        self.assertEqual(text, saved.read_text())
        plan = json.loads(text)
        for key in ("makespan_ms", "bound_ms", "gap", "assignments", "loads_ms", "memory_bytes"):
            self.assertIn(key, plan)
        self.assertEqual(plan["makespan_ms"], 1.4)
        self.assertAlmostEqual(plan["bound_ms"], 1.4, delta=0.002)
        self.assertEqual([one["name"] for one in plan["assignments"]][:2], ["layers.0.up", "layers.0.down"])
        self.assertEqual(len(plan["loads_ms"]), 2)
        self.assertEqual(len(plan["memory_bytes"]), 2)

    def test_the_table_shows_what_was_planned(self):
        text = self.succeeds("plan", *self.small)
        self.assertIn("small on 1x2", text)
        self.assertIn("costs: by hand", text)
        self.assertIn("makespan 1.400 ms", text)

    def test_a_picture_is_drawn(self):
        picture = self.folder / "plan.svg"
        self.succeeds("plan", *self.small, "--plot", picture)
        self.assertIn("<svg", picture.read_text())

    def test_a_picture_never_takes_the_place_of_the_plan_or_of_another_format(self):
        picture = self.folder / "plan.svg"
        self.complains("two files", "plan", *self.small, "--plot", picture, "--save", picture)
        self.complains(".svg", "plan", *self.small, "--plot", self.folder / "plan.png")
        self.assertFalse(picture.exists())

    def test_a_stand_in_says_so(self):
        self.assertIn("stand-in", self.succeeds("plan", "--model", "wall-wm", "--mesh", "8", "--strategy", "rank0"))

    def test_too_little_memory_is_answered_with_a_number_that_does(self):
        arguments = ("plan", "--model", "qwen2.5-7b", "--mesh", "2x4", "--max-memory")
        enough = self.complains("max_memory", *arguments, "1GB").split(">= ")[1].split()[0]
        self.succeeds(*arguments, enough)
        self.complains("max_memory", *arguments, str(int(enough) // 2))

    def test_sizes_may_have_units(self):
        for text, value in (("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("80gb", 80 * 10**9)):
            plan = json.loads(self.succeeds("plan", *self.small, "--json", "--max-memory", text))
            self.assertEqual(plan["options"]["max_memory_bytes"], value)
        self.complains("--max-memory", "plan", *self.small, "--max-memory", "80 parsecs")
        self.complains("--max-memory", "plan", *self.small, "--max-memory", "-5")
        self.complains("--max-memory", "plan", *self.small, "--max-memory", "1.5GB")
        self.complains("--max-memory", "plan", *self.small, "--max-memory", "99999999999GB")

    # Other commands.

    def test_models_are_listed(self):
        text = self.succeeds("models")
        for name in (*MODELS, "a800-sxm4-80gb", "h200-sxm5-141gb"):
            self.assertIn(name, text)

    def test_every_strategy_is_compared(self):
        text = self.succeeds("compare", *self.small)
        for name in ("load_balance", "lpt", "round_robin", "rank0", "xor_layout"):
            self.assertIn(name, text)
        rows = json.loads(self.succeeds("compare", *self.small, "--json"))
        rows = [row for row in rows if row["strategy"] != "milp" or "error" not in row]  # SciPy is optional
        self.assertEqual(min(row["makespan_ms"] for row in rows), rows[0]["makespan_ms"])

    def test_saved_plans_are_compared(self):
        first, second = self.folder / "a.json", self.folder / "b.json"
        self.succeeds("plan", *self.small, "--save", first)
        self.succeeds("plan", *self.small, "--save", second, "--strategy", "rank0")
        self.assertIn("0 of 4 matrices have another owner", self.succeeds("compare", first, first))
        text = self.succeeds("compare", first, second)
        self.assertIn(str(second), text)
        self.assertIn("2 of 4 matrices have another owner", text)
        other = self.folder / "c.json"
        self.succeeds("plan", *self.small[:-1], "2x1", "--save", other)
        self.complains("mesh", "compare", first, other)
        self.complains("two plan files", "compare", first)
        self.complains("--mesh", "compare", first, second, "--mesh", "2")
        self.complains("--json", "compare", first, second, "--json")
        self.complains("two plan files", "compare", first, second, first)
        self.complains("schema_version", "compare", first, self.costs)
        broken = self.file("broken.json", "{")
        for arguments in (("compare", first, broken), ("compare", broken, first)):
            self.assertIn(str(broken), self.complains("expected JSON", *arguments))

    def test_help_has_an_example(self):
        for command in COMMANDS:
            self.assertIn("Example", self.succeeds(command, "--help"))
        text = self.succeeds("--help")
        self.assertIn("Example", text)
        for command in COMMANDS:
            self.assertIn(command, text)

    def test_the_version_is_the_projects(self):
        listed = Path(__file__).parents[2].joinpath("CMakeLists.txt").read_text()
        self.assertIn(f"VERSION {self.succeeds('--version').strip()} ", listed)

    def test_of_many_moves_some_are_shown(self):
        plans = [self.folder / "a.json", self.folder / "b.json"]
        for file, strategy in zip(plans, ("rank0", "round_robin"), strict=True):
            self.succeeds("plan", "--model", "qwen2.5-7b", "--mesh", "2", "--save", file, "--strategy", strategy)
        text = self.succeeds("compare", *plans)
        moved = int(text.splitlines()[-1].split()[0])
        self.assertEqual(text.count(" -> "), 10)
        self.assertIn(f"... and {moved - 10} more\n", text)

    # The paper's MILP, by a Python of ours that says what it is told.

    def milp(self, script, *arguments):
        program = self.file("python", f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        environment = os.environ | {"DMUON_PYTHON": str(program)}
        return dmuon("plan", *self.small, "--strategy", "milp", *arguments, env=environment)

    @staticmethod
    def answer(proved):
        return f"""cat > /dev/null; echo '{{"counts": [[1, 1], [1, 1]], "proved": {proved}}}'"""

    def test_what_the_milp_did_not_prove_is_said_beside_the_plan(self):
        result = self.milp(self.answer("false"), "--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(json.loads(result.stdout)["strategy"], "milp")
        self.assertIn(b"not proved optimal", result.stderr)
        self.assertEqual(result.stderr.count(b"\n"), 1)
        self.assertEqual(self.milp(self.answer("true"), "--json").stderr, b"")

    def test_what_python_says_aside_is_no_part_of_the_milps_answer(self):
        result = self.milp("echo 'import time: 123' >&2; " + self.answer("true"), "--json")
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        self.assertEqual(json.loads(result.stdout)["makespan_ms"], 1.4)

    def test_a_milp_in_vain_is_answered_with_pythons_last_word(self):
        result = self.milp("cat > /dev/null; echo half; echo 'Traceback' >&2; echo 'no SciPy' >&2; exit 1")
        self.assertEqual((result.returncode, result.stdout), (2, b""))
        self.assertEqual(result.stderr.count(b"\n"), 1)
        self.assertTrue(result.stderr.endswith(b"no SciPy\n"), result.stderr)

    # Bad input.

    def test_bad_input_is_answered_in_one_line_that_names_it(self):
        model = ("--model", "pi0")
        self.complains("gpt-2", "plan", "--model", "gpt-2", "--mesh", "8")
        self.complains("tpu", "plan", *model, "--mesh", "8", "--device", "tpu")
        self.assertIn("milp", self.complains("best", "plan", *self.small, "--strategy", "best"))
        for mesh in ("0x8", "2y8", "99999999999x8", "2x8x2", "", "x", "-1", "1e3"):
            self.complains("--mesh", "plan", *model, f"--mesh={mesh}")
            self.complains("--mesh", "compare", *model, f"--mesh={mesh}")
        self.complains("num_replicates", "plan", *model, "--mesh", "1048576x8")
        self.complains("--tp", "plan", *model, "--mesh", "8", "--tp", "0")
        self.complains("tensor_parallel", "plan", *model, "--mesh", "8", "--tp", "1048576")
        self.complains("--lookahead", "plan", *model, "--mesh", "8", "--lookahead", "-1")
        self.complains("--layout-slack", "plan", *model, "--mesh", "8", "--layout-slack", "1.5")
        self.complains("--layout-slack", "plan", *model, "--mesh", "8", "--layout-slack", "much")
        self.complains("--inventory", "plan", *model, "--inventory", self.inventory, "--mesh", "8")
        self.complains("--model", "plan", "--mesh", "8")
        self.complains("--costs", "plan", *self.small, "--device", "cpu")

    def test_bad_arguments_are_answered_in_one_line(self):
        self.complains("plan, compare or models")
        self.complains("plans", "plans")
        self.complains("--mesh", "plan", "--model", "pi0")
        self.complains("--mesh", "compare", "--model", "pi0")
        self.complains("--mesh", "plan", "--model", "pi0", "--mesh")
        self.complains("--colour", "plan", *self.small, "--colour", "red")
        self.complains("extra", "models", "extra")

    def test_bad_files_are_answered_in_one_line_that_names_them(self):
        missing = self.folder / "missing.json"
        empty = self.file("empty.json", "")
        text = self.file("text.json", "no {JSON\n\n\n")
        binary = self.folder / "binary.json"
        binary.write_bytes(bytes(range(256)))
        for path in (missing, empty, self.folder):
            self.complains(str(path), "plan", "--inventory", path, "--mesh", "8")
            self.complains(str(path), "plan", "--inventory", self.inventory, "--costs", path, "--mesh", "8")
            self.complains(str(path), "compare", path, path)
        for path in (text, binary):
            self.complains("model", "plan", "--inventory", path, "--mesh", "8")
            self.complains("costs", "plan", "--inventory", self.inventory, "--costs", path, "--mesh", "8")
            self.complains("plan", "compare", path, path)

    def test_costs_that_lack_a_shape_name_it(self):
        lacking = self.file("lacking.json", COSTS | {"shapes": COSTS["shapes"][:1]})
        self.complains("4 x 4", "plan", "--inventory", self.inventory, "--costs", lacking, "--mesh", "8")
        self.complains("over TP", "plan", *self.small, "--tp", "2")

    def test_files_that_cannot_be_written_are_named(self):
        for path in (self.folder / "missing" / "plan.json", self.folder, "/dev/full"):
            self.complains(str(path), "plan", *self.small, "--save", path)
            self.complains(str(path), "plan", *self.small, "--plot", path)

    # Pipes.

    def test_a_pipe_that_closes_early_is_no_error(self):
        for arguments in (["models"], ["plan", *map(str, self.small), "--json"]):
            process = subprocess.Popen([COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            process.stdout.close()
            self.assertEqual(process.stderr.read(), b"")
            process.stderr.close()
            process.wait(timeout=120)
        result = subprocess.run(
            f"'{COMMAND}' models | head -1", shell=True, capture_output=True, timeout=120, check=True
        )
        self.assertEqual(result.stderr, b"")
        self.assertEqual(result.stdout.count(b"\n"), 1)

    def test_output_that_cannot_be_written_is_an_error(self):
        for redirection in (">/dev/full", ">&-"):
            result = subprocess.run(
                f"'{COMMAND}' models {redirection}", shell=True, capture_output=True, timeout=120, check=False
            )
            self.assertEqual(result.returncode, 2, redirection)
            self.assertEqual(result.stderr.count(b"\n"), 1)
            self.assertIn(b"standard output", result.stderr)


if __name__ == "__main__":
    sys.exit(unittest.main())
