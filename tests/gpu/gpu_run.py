"""Runs the parts, each as a process of its own, and prints what became of them: `make test-gpu OUT=folder`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = ("newton_schulz", "training", "nccl", "host_time", "memory")
MOST_S = 600  # of a part
FAILED = "failed"  # as in gpu_part.py: this program needs no PyTorch, so it can report a part without PyTorch


def run(name: str, out: Path, most_s: float = MOST_S) -> dict[str, Any]:
    """Runs a part, with its output in NAME.log. Returns its report, or its end if it wrote no report."""
    report, log = out / f"{name}.json", out / f"{name}.log"
    report.unlink(missing_ok=True)
    with log.open("w") as file:
        try:
            program = [sys.executable, str(HERE / f"part_{name}.py"), "--out", str(out)]
            code = subprocess.run(program, stdout=file, stderr=subprocess.STDOUT, timeout=most_s).returncode
            ended = f"ended with {code} and no report"
        except subprocess.TimeoutExpired:
            ended = f"took longer than {most_s:.0f} s"
    if report.exists():
        found: dict[str, Any] = json.loads(report.read_text())
        return found
    lost: dict[str, Any] = {"part": name, "status": FAILED, "device": "?", "seconds": 0.0, "failures": [ended]}
    report.write_text(json.dumps({**lost, "not_on_this_device": [], "figures": []}, indent=1) + "\n")
    return lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets a JSON file and a log for each part")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, to repeat these alone")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--parts: expected some of {','.join(PARTS)}; got {','.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["DMUON_CACHE_DIR"] = ""  # the figures are of no choice that the user has kept
    reports = []
    for name in names:
        print(f"{name} ...", flush=True)
        reports.append(run(name, options.out.resolve()))
    print(f"\n{'part':14} {'status':19} {'seconds':>8}  on {reports[0]['device']}")
    for report in reports:
        print(f"{report['part']:14} {report['status']:19} {report['seconds']:8.1f}  {'; '.join(report['failures'])}")
        for what in report.get("not_on_this_device", []):
            print(f"{'':14} not on this device: {what}")
    if all(report["device"] == "none" for report in reports):
        raise SystemExit("failed: there is no device to run on")
    failed = [report["part"] for report in reports if report["status"] == FAILED]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)} (logs in {options.out})")


if __name__ == "__main__":
    main()
