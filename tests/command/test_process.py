"""The command as a process: how it starts, its pipes, and what it does without."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest

COMMANDS = ([sys.executable, "-m", "dmuon"], [f"{sysconfig.get_path('scripts')}/dmuon"])


@pytest.mark.parametrize("command", COMMANDS, ids=["python -m dmuon", "dmuon"])
def test_it_starts_as_a_module_and_as_a_script(command):
    done = subprocess.run([*command, "plan", "--model", "pi0", "--mesh", "2x8"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("pi0 on 2x8\nstrategy load_balance")
    done = subprocess.run([*command, "plan"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "dmuon: the following arguments are required: --mesh\n",
    )


def test_it_imports_neither_torch_nor_what_it_does_not_use():
    """PyTorch takes seconds."""
    program = (
        "import sys; from dmuon._command.main import main; main(['compare', '--model', 'pi0', '--mesh', '2x8']); "
        "print(*{'torch', 'numpy', 'scipy', 'matplotlib', 'tqdm'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pi0 on 2x8, costs: ") and done.stderr == "\n"


@pytest.mark.parametrize("arguments", [["models"], ["plan", "--model", "pi0", "--mesh", "8", "--json"], ["--help"]])
def test_a_pipe_that_closes_early_is_no_error(arguments):
    process = subprocess.Popen([*COMMANDS[0], *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=600) == 0


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
def test_output_that_cannot_be_written_is_an_error(redirection):
    line = f"'{sys.executable}' -m dmuon models {redirection}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("dmuon: cannot write to standard output: ") and done.stderr.count("\n") == 1


def test_the_api_is_what_dir_shows():
    """In a process of its own: other tests import private modules."""
    program = "import dmuon; print(*dir(dmuon)); print(*(type(getattr(dmuon, name)).__name__ for name in dir(dmuon)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = done.stdout.splitlines()[0].split()
    assert {"Muon", "Plan", "Profile", "StepSchedule", "dedicate_params", "plan", "__version__"} <= set(names)
    assert [name for name in names if name.startswith("_")] == ["__version__"]
    kinds = dict(zip(names, done.stdout.splitlines()[1].split(), strict=True))
    assert [name for name, kind in kinds.items() if kind == "module"] == ["attention", "rules", "views"]
