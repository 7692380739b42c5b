"""Prints the path of nvcc, a semicolon, and the path of CUDA 12's ptxas; nothing for one that is missing.

nvcc is the first of: NVCC=, where "none" means none; nvcc of the environment's PyPI packages; nvcc on PATH. Users of
dmuon need none: the CUDA kernels are built into the extension module.
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


def find_older_ptxas(nvcc: str) -> str:
    """Returns PyPI's ptxas of CUDA 12 for PyPI's nvcc of CUDA 13; else an empty string.

    Drivers of CUDA 12 refuse the cubins for sm_80 and sm_90 that ptxas of CUDA 13 makes: their ELF ABI is a later one.
    """
    for folder in Path(nvcc).parents:
        ptxas = folder / "cuda_nvcc/bin/ptxas"
        if folder.name == "nvidia" and ptxas.is_file():
            return os.fspath(ptxas)
    return ""


if __name__ == "__main__":
    found = find()
    print(found, find_older_ptxas(found), sep=";", end="")
