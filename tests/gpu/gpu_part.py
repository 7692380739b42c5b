"""Runs a part: figures and checks of one device, as JSON and as a log. A part is a program that can start alone."""

from __future__ import annotations

import argparse
import json
import platform
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_device import Device, NotHere, open_device

PASSED, FAILED, NOT_HERE = "passed", "failed", "not on this device"


class Findings:
    """The figures and failures of a part so far."""

    def __init__(self) -> None:
        self.figures: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.not_here: list[str] = []

    def figure(self, **values: Any) -> None:
        """Stores a row of figures, and prints it."""
        self.figures.append(values)
        print("  ".join(f"{name} {_short(value)}" for name, value in values.items()), flush=True)

    def check(self, claim: str, holds: bool, found: object) -> None:
        """A claim that fails the part where it does not hold."""
        print(f"{'ok' if holds else 'FAILED'}: {claim}: {_short(found)}", flush=True)
        if not holds:
            self.failures.append(f"{claim}: {_short(found)}")

    def attempt(self, section: Callable[[], None]) -> None:
        """Runs a section of a part. If it raises, the part fails, and goes on with the next section."""
        try:
            section()
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")

    def leave_out(self, what: str) -> None:
        """Something of the part that this device cannot show."""
        print(f"{NOT_HERE}: {what}", flush=True)
        self.not_here.append(what)


def run_part(name: str, part: Callable[[Device, Findings], None]) -> None:
    """Runs a part as a program: `--out FOLDER` gets NAME.json. Exits with 1 if a check failed."""
    parser = argparse.ArgumentParser(description=part.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    begin, findings, status, device = time.time(), Findings(), PASSED, "none"
    try:
        found = open_device()
        device = found.name
        part(found, findings)
    except NotHere as why:
        status = NOT_HERE
        findings.leave_out(str(why))
    except Exception as error:
        traceback.print_exc()
        findings.failures.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    report = {
        "part": name,
        "status": FAILED if findings.failures else status,
        "device": device,
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
        "seconds": round(time.time() - begin, 1),
        "failures": findings.failures,
        "not_on_this_device": findings.not_here,
        "figures": findings.figures,
    }
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(report["status"] == FAILED)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
