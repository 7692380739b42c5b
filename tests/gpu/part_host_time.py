"""Host time of a step at 16 and 256 ranks that do not exist, beside FSDP2 with fused AdamW (bench/host_time.py)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_device import Device
from gpu_part import Findings, run_part

PROGRAM = Path(__file__).resolve().parents[2] / "bench" / "host_time.py"
MESHES = ("2x8", "32x8")
MODELS = ("matrices", "transformer")


def part(device: Device, findings: Findings) -> None:
    """See the head of the file."""
    for mesh in MESHES:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "host_time.json")
            # Without hardware the kernels would run on the host: then they are the CPU's, on tiny tensors.
            options = ["--device", "cuda", "--rounds", "8"] if device.is_real else ["--rounds", "4", "--steps", "2"]
            program = [sys.executable, str(PROGRAM), "--mesh", mesh, "--models", ",".join(MODELS), "--json", str(file)]
            subprocess.run([*program, *options], check=True)
            said = json.loads(file.read_text())
        for model in MODELS:
            medians, ratio = said[model]["median_ms"], said[model]["ratio"]["dmuon"]
            findings.figure(mesh=mesh, model=model, adamw_ms=medians["adamw"]["all"], dmuon_ms=medians["dmuon"]["all"])
            if device.is_real:
                findings.check(f"{mesh}, {model}: no more than FSDP2", ratio["low"] <= 1, ratio["median"])
    if not device.is_real:
        findings.leave_out("launches of a real driver: these are times on the CPU's kernels")


if __name__ == "__main__":
    run_part("host_time", part)
