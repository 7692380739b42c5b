"""The section of versions."""

from __future__ import annotations

import mmap
import platform
import re
import sys
from pathlib import Path

from dmuon import _plan
from dmuon._doctor.findings import Findings


def versions(findings: Findings) -> None:
    """Reports the versions of dmuon and of everything below it."""
    fact = findings.fact
    fact("dmuon", f"{_plan.__version__}, {Path(_plan.__file__).parent}")
    fact("Python", f"{platform.python_version()}, {sys.executable}")
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "?") if Path("/etc/os-release").exists() else "?"
    fact("system", f"{system}, Linux {platform.release()}, {' '.join(platform.libc_ver())}, {platform.machine()}")
    fact("compiler of dmuon", _compilers(Path(_plan.__file__)))
    import torch

    fact("PyTorch", f"{torch.__version__}, {Path(torch.__file__).parent}")
    fact("CUDA of PyTorch", torch.version.cuda or (f"none; ROCm {torch.version.hip}" if torch.version.hip else "none"))
    if torch.version.cuda:
        from torch.cuda import nccl

        fact("NCCL of PyTorch", ".".join(map(str, nccl.version())))
    from dmuon import _C  # noqa: F401  (the engine must load)


def _compilers(library: Path) -> str:
    """Returns the compilers that have left their name in a library."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = re.findall(rb"(?:GCC: \([^)\0]*\) |clang version )\d[\d.]*", content)
    return ", ".join(sorted({name.decode() for name in found})) or "unknown"
