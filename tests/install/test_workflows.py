"""The workflows run what the project runs, and build wheels for the last four minor versions of PyTorch."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def constant(name: str) -> str:
    spec = importlib.util.spec_from_file_location("pytorch_of_cmake", ROOT / "cmake" / "pytorch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.series(getattr(module, name))


def minor(series: str) -> int:
    major, minor = series.split(".")
    assert major == "2"
    return int(minor)


def test_ci_runs_what_a_change_has_to_pass():
    assert re.findall(r"^ +- run: (.*)$", WORKFLOWS["ci"], re.MULTILINE) == [".ci/run"]


def test_wheels_are_for_four_minor_versions_in_a_row():
    versions = json.loads(re.search(r"^ +torch: (\[.*\])$", WORKFLOWS["wheels"], re.MULTILINE)[1])
    first = minor(versions[0])
    assert [minor(version) for version in versions] == list(range(first, first + 4))
    assert constant("DEFAULT") in versions
    assert first >= minor(constant("MINIMUM"))


def test_the_site_is_built_as_make_builds_it():
    assert re.findall(r"^ +- run: (.*)$", WORKFLOWS["docs"], re.MULTILINE) == ["make docs"]
    assert "\ndocs: " in (ROOT / "Makefile").read_text()
