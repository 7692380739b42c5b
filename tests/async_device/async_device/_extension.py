"""Finds the extension that CMake built."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch  # noqa: F401 - its libraries must be loaded first

_NAME = "_async_device"
_ROOT = Path(__file__).resolve().parents[3]


def folder() -> Path:
    """ASYNC_DEVICE_BUILD, or else the build folder of this clone."""
    return Path(os.environ.get("ASYNC_DEVICE_BUILD", _ROOT / "build/release/tests/async_device"))


def load() -> ModuleType:
    """The module, from `folder`.

    Raises:
        ImportError: it has not been built.
    """
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    found = sorted(folder().glob(f"{_NAME}*.so"))
    if not found:
        raise ImportError(f"no {_NAME}*.so in {folder()}: cmake --build build/release --target async_device")
    spec = importlib.util.spec_from_file_location(_NAME, found[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    return module
