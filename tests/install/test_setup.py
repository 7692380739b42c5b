"""tools/setup on a machine without a network: what is there is enough, and ccache is not missed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def offline(tmp_path):
    """A clone's files for set-up, and programs without ccache, with an apt-get that finds no server."""
    clone, programs = tmp_path / "clone", tmp_path / "bin"
    for name in ("tools/setup", "cmake/pytorch.py", "pyproject.toml"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    programs.mkdir()
    (programs / "apt-get").write_text("#!/bin/sh\necho no server\nexit 100\n")
    (programs / "sudo").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    for folder in os.environ["PATH"].split(":"):
        for program in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if program.name != "ccache" and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    environment = {**os.environ, "PATH": str(programs), "PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    for name in ("VIRTUAL_ENV", "TORCH", "CXX"):
        environment.pop(name, None)

    def setup(**changes: str) -> subprocess.CompletedProcess[str]:
        command = [str(clone / "tools/setup")]
        return subprocess.run(command, env={**environment, **changes}, capture_output=True, text=True, timeout=600)

    return setup, clone


@pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("ninja"), reason="set-up would have to fetch them")
def test_it_goes_on_without_ccache(offline):
    setup, clone = offline
    done = setup()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "setup: goes on without ccache, which only saves time" in done.stdout
    assert "no server" in (clone / "build/setup.log").read_text()
    assert f"DMUON_PYTHON={sys.executable}" in (clone / "build/environment").read_text()


def test_what_it_needs_and_cannot_install_is_named(offline):
    setup, clone = offline
    (clone / "tools/setup").write_text((ROOT / "tools/setup").read_text().replace("nlohmann/json.hpp", "no/such.hpp"))
    done = setup()
    assert done.returncode == 1
    words = "please install these system packages (Debian's names), then run this again: nlohmann-json3-dev"
    assert words in done.stderr


def test_a_wheel_of_the_headers_replaces_the_package(offline, tmp_path):
    setup, clone = offline
    (clone / "tools/setup").write_text((ROOT / "tools/setup").read_text().replace("nlohmann/json.hpp", "no/such.hpp"))
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "nlohmann_json-3.12.0-py3-none-any.whl").write_text("no wheel")
    done = setup(DMUON_WHEELS=str(tmp_path / "wheels"))
    # pip takes it from the folder, which is the last step.
    assert "please install" not in done.stderr and "nlohmann_json-3.12.0-py3-none-any.whl" in done.stderr
