"""Runs the parts, each as a process of its own, and prints what became of them: `make test-gpu OUT=folder`.

The machine may be lent for minutes and give back few files: `--most` bounds the whole, and `--archive` is one file,
renewed after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = ("training", "features", "nccl", "memory", "newton_schulz", "steps", "kernels", "host_time")
MOST_S = 600.0  # of a part
LEAST_S = 20.0  # a part is not begun with less
FAILED = "failed"  # as in gpu_part.py: this program needs no PyTorch, so it can report a part without PyTorch
NOT_BEGUN = "not begun"


def run(name: str, out: Path, most_s: float) -> dict[str, Any]:
    """Runs a part, with its output in NAME.log. Returns its report, or its end if it wrote no report."""
    report, log = out / f"{name}.json", out / f"{name}.log"
    report.unlink(missing_ok=True)
    with log.open("w") as file:
        program = [sys.executable, str(HERE / f"part_{name}.py"), "--out", str(out)]
        part = subprocess.Popen(program, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            ended = f"ended with {part.wait(most_s)} and no report"
        except subprocess.TimeoutExpired:
            ended = f"took longer than {most_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(part.pid, signal.SIGKILL)  # with the ranks that it has started
            part.wait()
    if report.exists():
        found: dict[str, Any] = json.loads(report.read_text())
        return found
    lost = without_report(name, FAILED, ended)
    report.write_text(json.dumps({**lost, "not_on_this_device": [], "figures": []}, indent=1) + "\n")
    return lost


def without_report(name: str, status: str, why: str) -> dict[str, Any]:
    return {"part": name, "status": status, "device": "?", "seconds": 0.0, "failures": [why]}


def pack(folder: Path, archive: Path) -> None:
    """Writes the folder as one file, which is whole at any time."""
    unfinished = archive.with_name(f"{archive.name}.unfinished")
    with tarfile.open(unfinished, "w:gz") as file:
        for one in sorted(folder.iterdir()):
            if one.name not in (archive.name, unfinished.name):
                file.add(one, f"{folder.name}/{one.name}")
    unfinished.replace(archive)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="gets a JSON file and a log for each part")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, to repeat these alone")
    parser.add_argument("--most", type=float, metavar="S", help="seconds for all parts together; each has ten minutes")
    parser.add_argument("--archive", type=Path, help="also gets all of --out, as one .tgz")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--parts: expected some of {','.join(PARTS)}; got {','.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["DMUON_CACHE_DIR"] = ""  # the figures are of no choice that the user has kept
    reports = []
    end = time.monotonic() + (options.most or MOST_S * len(names))
    for name in names:
        left = end - time.monotonic()
        if left < LEAST_S:
            reports.append(without_report(name, NOT_BEGUN, f"{max(0, left):.0f} s were left"))
            continue
        print(f"{name} ...", flush=True)
        reports.append(run(name, options.out.resolve(), min(left, MOST_S)))
        if options.archive:
            pack(options.out.resolve(), options.archive.resolve())
    print(f"\n{'part':14} {'status':19} {'seconds':>8}  on {reports[0]['device']}")
    for report in reports:
        print(f"{report['part']:14} {report['status']:19} {report['seconds']:8.1f}  {'; '.join(report['failures'])}")
        for what in report.get("not_on_this_device", []):
            print(f"{'':14} not on this device: {what}")
    if all(report["device"] == "none" for report in reports):
        raise SystemExit("failed: there is no device to run on")
    failed = [report["part"] for report in reports if report["status"] == FAILED]
    left_over = [report["part"] for report in reports if report["status"] == NOT_BEGUN]
    words = [f"failed: {', '.join(failed)} (logs in {options.out})"] if failed else []
    words += [f"not begun: --parts {','.join(left_over)}"] if left_over else []
    if words:
        raise SystemExit("; ".join(words))


if __name__ == "__main__":
    main()
