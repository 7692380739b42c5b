"""Prints the path of nvcc, or nothing if there is none.

The first of: NVCC=, where "none" means none; nvcc of the environment's PyPI packages; nvcc on PATH. Users of dmuon
need none: the CUDA kernels are built into the extension module.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path


def find() -> str:
    """Returns the path, or an empty string."""
    asked = os.environ.get("NVCC")
    if asked:
        return "" if asked == "none" else shutil.which(asked) or ""
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or []:
        for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True):
            return os.fspath(nvcc)
    return shutil.which("nvcc") or ""


if __name__ == "__main__":
    print(find(), end="")
