"""Says which PyTorch dmuon is built for: the one of the environment that it will be installed into.

Compiled code fits one series of PyTorch's versions, so what is built depends on that series. pip builds in an
environment of its own that holds only what a project requires to build. Requiring PyTorch always would download
gigabytes and build for the newest one, whichever the user has. So the user's is looked for where pip hides it, and
only if there is none, the version below is required: first to build, then by what was built.

As a program it prints the version and the folder for CMake; `Provider` is a plugin of scikit-build-core.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MINIMUM = "2.9"
DEFAULT = "2.13.0"
MINIMUM_FOR_KERNELS = "2.11"  # the first that shows dmuon its streams
# nvcc with its compiler and headers, 104 MB, and CUDA 12's ptxas, 40 MB; cmake/nvcc.py finds them.
CUDA_PACKAGES = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-nvcc-cu12==12.9.86",
)


def find() -> tuple[str, Path] | None:
    """Version and folder of the PyTorch that this interpreter imports or, in pip's own environment, would import."""
    for folder in (Path(entry) / "torch" for entry in [*sys.path, *_site_packages()]):
        if (folder / "version.py").is_file() and (folder / "lib").is_dir():
            version = re.search(r"^__version__ = '(.+)'", (folder / "version.py").read_text(), re.MULTILINE)
            if version is not None:
                return version[1], folder.absolute()
    return None


def _site_packages() -> Iterator[str]:
    yield from site.getsitepackages([sys.prefix])
    settings = Path(sys.prefix, "pyvenv.cfg")
    if settings.is_file() and re.search(r"include-system-site-packages\s*=\s*true", settings.read_text()):
        yield from site.getsitepackages([sys.base_prefix])


def series(version: str) -> str:
    """Returns "2.13" for "2.13.0+cpu"."""
    return ".".join(version.split(".")[:2])


def at_least(minimum: str, version: str) -> bool:
    """True if a PyTorch is of the series `minimum`, such as "2.9", or of a later one."""
    return tuple(map(int, series(version).split("."))) >= tuple(map(int, minimum.split(".")))


def has_cuda(folder: Path) -> bool:
    """True if the PyTorch in this folder is built for CUDA."""
    return re.search(r"^cuda\b.* = '", (folder / "version.py").read_text(), re.MULTILINE) is not None


def missing_cuda_packages() -> list[str]:
    """Requirements for nvcc that this environment has in no version; PyTorch may have brought some."""
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    return [package for package in CUDA_PACKAGES if package.split("==")[0] not in installed]


def _wants_nvcc(found: tuple[str, Path] | None) -> bool:
    """True if pip shall bring nvcc: where somebody asks for it, or PyTorch can use the kernels."""
    if os.environ.get("NVCC"):  # "none", or another one
        return False
    if os.environ.get("DMUON_CUDA") == "1":
        return True
    return found is not None and at_least(MINIMUM_FOR_KERNELS, found[0]) and has_cuda(found[1])


class Provider:
    """The requirements that pyproject.toml cannot name."""

    def get_requires_for_dynamic_metadata(self, _: Mapping[str, Any]) -> list[str]:
        """The packages that pip installs for the build."""
        found = find()
        requires = [] if found else [f"torch=={DEFAULT}"]
        if _wants_nvcc(found):
            requires.extend(CUDA_PACKAGES)
        headers = (Path(prefix, "include/nlohmann/json.hpp") for prefix in (sys.prefix, "/usr/local", "/usr"))
        if not any(header.is_file() for header in headers):
            requires.append("nlohmann-json>=3.11")
        return requires

    def dynamic_metadata(self, settings: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        """The dependencies of an installed dmuon: the `dependencies` of the settings and its series of PyTorch."""
        found = find()
        return {"dependencies": [f"torch=={series(found[0] if found else DEFAULT)}.*", *settings["dependencies"]]}


def main() -> None:
    """Prints version;folder."""
    found = find()
    if found is None:
        sys.exit(f"dmuon needs PyTorch to build; {sys.executable} has none")
    version, folder = found
    if not at_least(MINIMUM, version):
        sys.exit(f"dmuon needs PyTorch >= {MINIMUM}; {sys.executable} has {version}")
    print(version, os.fspath(folder), sep=";", end="")


if __name__ == "__main__":
    main()
