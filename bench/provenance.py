"""Records the hardware, versions and command behind a figure."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import torch


def machine(device: torch.device) -> str:
    """The name of a device, for a picture."""
    facts = provenance()
    return facts["gpu" if device.type == "cuda" else "cpu"]


def provenance() -> dict[str, str]:
    """Lines to print above any table of figures, in order."""
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    facts = {
        "cpu": f"{model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "threads a rank": str(torch.get_num_threads()),
        "load at start": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "command": " ".join(sys.argv),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    network = os.environ.get("BENCH_RATE")
    if network:
        facts["network"] = f"{os.environ.get('BENCH_NODES', '1')} nodes, {network} a node and direction"
    return facts
