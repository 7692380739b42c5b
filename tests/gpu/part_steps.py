"""A training step of a GPT under FSDP2 on one rank: fused AdamW beside dmuon by ATen, by its defaults, and tuned.

bench/train_step.py measures the steps; "host" is the time until the host has issued one. A narrow GPT, whose step the
host decides, has its batches launched and in CUDA graphs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from dmuon._planning.choices import Result, Setting, store
from dmuon._planning.tuning import tune
from dmuon._setup.hyperparameters import plain_choice
from gpu_device import Device
from gpu_part import Findings, run_part
from gpu_products import COEFFICIENTS

from dmuon import _C

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "train_step.py"
PARTS = ("step", "forward", "backward", "optimizer", "host")
WIDTH = 4096
SIDES = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
TUNE_S = 60.0
REAL = {"layers": 4, "width": WIDTH, "heads": 32, "sequence": 2048, "batch": 4, "rounds": 5, "steps": 3}
NARROW = {"layers": 12, "width": 512, "heads": 8, "sequence": 512, "batch": 4, "rounds": 5, "steps": 3}
SMALL = {"layers": 2, "width": 64, "heads": 2, "rounds": 3, "steps": 2}


def part(device: Device, findings: Findings) -> None:
    """See the head of the file."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DMUON_CACHE_DIR"] = str(Path(folder, "tuned"))
        aten = Path(folder, "aten")
        if device.is_real:
            where = device.use(0)
            setting = Setting(where, _C.default_ns_dtype(where), COEFFICIENTS)
            choose_aten(aten, setting)
            choose(findings, setting)
        names = {"adamw": "adamw", "dmuon, ATen": f"dmuon@{aten}", "dmuon, untuned": "dmuon@", "dmuon, tuned": "dmuon"}
        file = Path(folder, "steps.json")
        found = measured(REAL if device.is_real else SMALL, ",".join(names.values()), file)
        graphs = [
            measured(NARROW if device.is_real else SMALL, "adamw,dmuon", file, DMUON_CUDA_GRAPHS=value)["dmuon"]
            for value in ("0", "1")
        ]
    for name, key in names.items():
        ratio = found[key]["ratio_to_adamw"]
        parts = {f"{part}_ms": found[key][f"{part}_ms"] for part in PARTS}
        findings.figure(optimizer=name, **parts, x_adamw=ratio["median"], low=ratio["low"], high=ratio["high"])
    for name, one in zip(("launches", "CUDA graphs"), graphs, strict=True):
        findings.figure(narrow=name, **{f"{part}_ms": one[f"{part}_ms"] for part in PARTS})
    if device.is_real:
        ratio = found["dmuon"]["step_ms"] / found["dmuon@"]["step_ms"]
        findings.check("choices of `dmuon tune` make no step slower", ratio <= 1.02, ratio)
    else:
        findings.leave_out("steps of a GPU: these are times on the CPU")


def measured(options: dict[str, int], optimizers: str, file: Path, **environment: str) -> dict[str, Any]:
    """Returns what bench/train_step.py finds."""
    program = [sys.executable, str(PROGRAM), "--mesh", "1", "--optim", optimizers, "--json", str(file)]
    program += [f"--{name}={value}" for name, value in options.items()]
    subprocess.run(program, check=True, env={**os.environ, **environment})
    return json.loads(file.read_text())["optimizers"]  # type: ignore[no-any-return]


def choose_aten(folder: Path, setting: Setting) -> None:
    """Stores ATen's operators as if `dmuon tune` had chosen them."""
    with mock.patch.dict(os.environ, {"DMUON_CACHE_DIR": str(folder)}):
        for rows, cols in SIDES:
            one = next(one for one in setting.candidates(rows, cols) if one.backend == "aten")
            choice = (*plain_choice(one)[:-1], "aten")
            store(Result._make((1, rows, cols, *choice, 1, 0.0, *choice, 1, 0.0, 1.0)), setting)


def choose(findings: Findings, setting: Setting) -> None:
    """Tunes the shapes of the model's blocks."""
    results, unreached = tune([(REAL["layers"], *sides) for sides in SIDES], setting, TUNE_S)
    for one in results:
        choice = " ".join(map(str, one[3:8]))
        findings.figure(tuned=f"{one.number}x{one.rows}x{one.cols}", choice=choice, x_default=one.ratio)
    findings.check("all shapes are tuned", not unreached, unreached or "yes")


if __name__ == "__main__":
    run_part("steps", part)
