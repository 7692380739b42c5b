"""Plants each bug of planted.py in a copy of the working tree and lets fuzz.py, or the asynchronous device, look for it
there.

Status 0: it found all of them. The copy is built and used by itself; nothing here or in the environment changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from planted import PLANTED
from planted_change import Planted

ROOT = Path(__file__).parents[2]
FOUND = re.compile(r"failed after (\d+) programs")
LAST_LINES = 20  # of what a run printed, for the report


class Failed(Exception):
    """A command of the copy, with the end of what it printed."""


@dataclasses.dataclass
class Outcome:
    name: str
    file: str
    verdict: str
    found_after: int | None = None  # programs; of pytest 1
    seconds: float = 0.0
    output: list[str] = dataclasses.field(default_factory=list)


class Copy:
    """The working tree elsewhere, with a build and a Python environment of its own."""

    def __init__(self, folder: Path, jobs: int) -> None:
        # The build lies where that of a clone does, so that ccache knows what any clone has compiled.
        self.tree, self.build, self.jobs = folder / "tree", folder / "tree/build/release", jobs
        self.variables = _variables()
        for name in _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
            if name and (ROOT / name).is_file():  # a deleted file is listed too
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        self.python = self._environment(folder / "environment")
        configure = ["-S", self.tree, "-B", self.build, "-G", "Ninja", f"-DPython_EXECUTABLE={self.python}"]
        self._run("cmake", *configure, "-DCMAKE_BUILD_TYPE=Release", "-DDMUON_BUILD_TESTS=OFF")

    def _environment(self, folder: Path) -> Path:
        # The caller's packages are found as plain folders, so that the .pth file of an editable dmuon, whose finder
        # comes before every path, is not read; and the copy's dmuon, put first, is the one that every process imports.
        self._run("python", "-m", "venv", "--without-pip", folder)
        paths = self._run("python", "-c", "import sys; print(*sys.path, sep='\\n')").splitlines()
        packages = [path for path in paths if path.endswith("-packages")]
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "copy.pth").write_text("\n".join([str(self.tree / "python"), *packages]) + "\n")
        return folder / "bin" / "python"

    def make(self) -> None:
        """Compiles what has changed."""
        self._run("cmake", "--build", self.build, "--target", "_C", "--parallel", str(self.jobs))
        self._run("cmake", "--install", self.build, "--prefix", self.tree / "python")

    def check(self) -> None:
        """That the copy is what is imported there."""
        code = "import torch, dmuon; print(dmuon.__file__, dmuon._C.__file__, dmuon._C.in_backward())"
        found = self._run(self.python, "-c", code).split()
        if not all(Path(file).is_relative_to(self.tree) for file in found[:2]):
            raise Failed(f"expected dmuon of {self.tree}, got {found[:2]}")

    def play_on_device(self) -> Outcome:
        """Runs test_async_device.py, on the device that was built here."""
        build = {"ASYNC_DEVICE_BUILD": str(ROOT / "build/release/tests/async_device")}
        tests = self.tree / "tests/programs/test_async_device.py"
        begun = time.monotonic()
        done = subprocess.run(
            [str(self.python), "-m", "pytest", "-x", str(tests)], cwd=self.tree, env={**self.variables, **build},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        failed = re.search(r"^FAILED .*::(\S+)", done.stdout, re.MULTILINE)
        verdict = f"found by {failed[1]}" if failed and done.returncode == 1 else "NOT FOUND"
        return Outcome("", "", verdict, 1 if failed else None, time.monotonic() - begun, _told(done.stdout))

    def fuzz(self, programs: int, seed: int, limit: float) -> Outcome:
        """Runs fuzz.py until it names a program that fails, is through or takes more than `limit` seconds."""
        command = [self.python, "-u", self.tree / "tests/programs/fuzz.py", "--seed", seed, "--programs", programs]
        begun = time.monotonic()
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=self.tree,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        late = threading.Timer(limit, _end, [process])
        late.start()
        outcome = Outcome("", "", "")
        try:
            assert process.stdout is not None
            for line in process.stdout:
                outcome.output = [*outcome.output, line.rstrip("\n")][-LAST_LINES:]
                if found := FOUND.search(line):
                    # What comes now, the search for the least such program, is not asked for.
                    outcome.found_after, outcome.verdict = int(found[1]), f"found after {found[1]} programs"
                    return outcome
            status = process.wait()
            outcome.seconds = time.monotonic() - begun
            if outcome.seconds >= limit:
                outcome.verdict = f"NOT FOUND in {limit / 60:g} minutes"
            else:
                outcome.verdict = "NOT FOUND" if status == 0 else f"NOT FOUND: fuzz.py ended with status {status}"
            return outcome
        finally:
            outcome.seconds = time.monotonic() - begun
            late.cancel()
            _end(process)

    def _run(self, *command: object) -> str:
        done = subprocess.run(
            list(map(str, command)), env=self.variables, cwd=self.tree, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"{shlex.join(map(str, command))}:\n" + "\n".join(done.stdout.splitlines()[-LAST_LINES:]))
        return done.stdout


def _variables() -> dict[str, str]:
    """Of the environment that tools/setup left, with its compiler."""
    script = f". {shlex.quote(str(ROOT / 'build/environment'))} && env -0"
    done = subprocess.run(["bash", "-c", script], text=True, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit("plant: expected build/environment, which tools/setup makes")
    variables = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):  # another dmuon may lie there
        variables.pop(name, None)
    return {"OMP_NUM_THREADS": "1", **variables}


def _told(output: str) -> list[str]:
    """The errors of a run of pytest."""
    return [line for line in output.splitlines() if line.startswith("E  ")][:LAST_LINES]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout


def _end(process: subprocess.Popen[str]) -> None:
    """Ranks are processes too, of the same group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def attempt(copy: Copy, bug: Planted, arguments: argparse.Namespace) -> Outcome:
    try:
        with bug.in_copy(copy.tree):
            copy.make()
            if not arguments.programs:
                return Outcome(bug.name, bug.file, "builds")
            if bug.on_device:
                outcome = copy.play_on_device()
            else:
                outcome = copy.fuzz(arguments.programs, arguments.seed, 60 * arguments.minutes)
    except (Failed, ValueError) as error:
        return Outcome(bug.name, bug.file, "CANNOT BE PLANTED", output=str(error).splitlines())
    return dataclasses.replace(outcome, name=bug.name, file=bug.file)


def check_sound(copy: Copy, arguments: argparse.Namespace) -> None:
    """Who finds something where nothing is planted finds nothing at all."""
    copy.make()
    copy.check()
    if arguments.programs and arguments.sound:
        fuzzed = copy.fuzz(arguments.sound, arguments.seed, 60 * arguments.minutes)
        for outcome in (fuzzed, copy.play_on_device()):
            if outcome.verdict != "NOT FOUND":
                raise Failed("\n".join([f"without a planted bug: {outcome.verdict}", *outcome.output]))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [bug.name for bug in PLANTED]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help="these bugs")
    parser.add_argument("--programs", type=int, default=500, help="the most that fuzz.py may play; 0 only builds")
    parser.add_argument("--seed", type=int, default=0, help="of fuzz.py")
    parser.add_argument("--minutes", type=float, default=30, help="the most that fuzz.py may take for a bug")
    parser.add_argument("--sound", type=int, default=20, help="programs that must pass first, with no bug planted")
    parser.add_argument("--jobs", type=int, default=2, help="of the compiler")
    parser.add_argument("--json", type=Path, help="writes what came out")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no ranks and no copy behind
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="dmuon-planted-") as folder:
        try:
            copy = Copy(Path(folder), arguments.jobs)
            check_sound(copy, arguments)
        except Failed as error:
            print(f"plant: {error}", file=sys.stderr)
            return 1
        for bug in (bug for bug in PLANTED if bug.name in arguments.only):
            outcomes.append(attempt(copy, bug, arguments))
            print(f"{bug.name}: {outcomes[-1].verdict} ({outcomes[-1].seconds:.0f} s)", flush=True)
            if arguments.json is not None:  # after each: the whole takes long
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(list(map(dataclasses.asdict, outcomes)), indent=1) + "\n")
    bad = [outcome for outcome in outcomes if outcome.found_after is None and outcome.verdict != "builds"]
    width = max(len(outcome.name) for outcome in outcomes)
    print("\n" + "\n".join(f"{outcome.name:{width}}  {outcome.verdict}" for outcome in outcomes))
    for outcome in bad:
        print("\n".join([f"\n{outcome.name}: {outcome.verdict}", *outcome.output]))
    print(f"\n{len(outcomes) - len(bad)} of {len(outcomes)} planted bugs {'found' if arguments.programs else 'build'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
