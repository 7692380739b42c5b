"""A training step of a GPT under FSDP2 on one rank: fused AdamW beside dmuon, by choices of `dmuon tune` and by none.

bench/train_step.py measures the steps; "host" is the time until the host has issued one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from dmuon._planning.choices import Setting
from dmuon._planning.tuning import tune
from gpu_device import Device
from gpu_part import Findings, run_part
from gpu_products import COEFFICIENTS

from dmuon import _C

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "train_step.py"
NAMES = ("adamw", "dmuon_untuned", "dmuon")
WIDTH = 4096
TUNE_S = 25.0
REAL = {"layers": 4, "width": WIDTH, "heads": 32, "sequence": 2048, "batch": 4, "rounds": 6, "steps": 3}
SMALL = {"layers": 2, "width": 64, "heads": 2, "rounds": 3, "steps": 2}


def part(device: Device, findings: Findings) -> None:
    """See the head of the file."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DMUON_CACHE_DIR"] = folder
        if device.is_real:
            choose(findings, device.use(0))
        file = Path(folder, "steps.json")
        options = [f"--{name}={value}" for name, value in (REAL if device.is_real else SMALL).items()]
        program = [sys.executable, str(PROGRAM), "--mesh", "1", "--optim", ",".join(NAMES), "--json", str(file)]
        subprocess.run([*program, *options], check=True)
        found = json.loads(file.read_text())["optimizers"]
    for name in NAMES:
        ratio = found[name]["ratio_to_adamw"]
        parts = {
            f"{part}_ms": found[name][f"{part}_ms"] for part in ("step", "forward", "backward", "optimizer", "host")
        }
        findings.figure(optimizer=name, **parts, x_adamw=ratio["median"], low=ratio["low"], high=ratio["high"])
    if device.is_real:
        ratio = found["dmuon"]["step_ms"] / found["dmuon_untuned"]["step_ms"]
        findings.check("choices of `dmuon tune` make no step slower", ratio <= 1.02, ratio)
    else:
        findings.leave_out("steps of a GPU: these are times on the CPU")


def choose(findings: Findings, where: torch.device) -> None:
    """Tunes the shapes of the model's blocks."""
    sides = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
    setting = Setting(where, _C.default_ns_dtype(where), COEFFICIENTS)
    results, unreached = tune([(REAL["layers"], *one) for one in sides], setting, TUNE_S)
    for one in results:
        findings.figure(
            tuned=f"{one.number}x{one.rows}x{one.cols}", choice=" ".join(map(str, one[3:8])), x_default=one.ratio
        )
    findings.check("all shapes are tuned", not unreached, unreached or "yes")


if __name__ == "__main__":
    run_part("steps", part)
