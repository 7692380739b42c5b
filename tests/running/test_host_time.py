"""A step can be timed on ranks that do not exist: torch's fake backend answers for them (bench/host_time.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "host_time.py"
RUN_S = 300  # for hangs


@pytest.mark.parametrize("mesh", ["2x2", "32x8"])
def test_every_step_is_taken_and_every_part_of_it_is_timed(tmp_path, mesh):
    file = tmp_path / "host_time.json"
    options = ["--mesh", mesh, "--blocks", "2", "--rounds", "2", "--steps", "1", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr  # which it is not where a step was skipped
    said = json.loads(file.read_text())
    kinds = ("bare", "rest", "adamw", "dmuon")
    heads = ("bare", "1 head", "8 heads", "64 heads")
    for model, expected in {"matrices": kinds, "transformer": kinds, "heads": heads}.items():
        assert tuple(said[model]["median_ms"]) == expected
        for kind in expected:
            assert min(said[model]["median_ms"][kind].values()) > 0
            assert len(said[model]["seconds"][kind]) == 2
    assert said["matrices"]["ratio"]["adamw"]["median"] == said["heads"]["ratio"]["1 head"]["median"] == 1
