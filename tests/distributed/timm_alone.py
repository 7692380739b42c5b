"""Imports timm where torchvision is not, or is for another build of PyTorch: the models here do without."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from unittest.mock import MagicMock

_TRANSFORMS = ("transforms", "transforms.functional")
_MODELS = ("models", "models.feature_extraction", "ops", "ops.misc", "datasets")


def import_timm() -> ModuleType:
    with contextlib.suppress(KeyError):
        return sys.modules["timm"]
    stands_in = ["torchvision", *(f"torchvision.{name}" for name in (*_TRANSFORMS, *_MODELS))]
    sys.modules.update((name, MagicMock()) for name in stands_in)
    import timm

    for name in stands_in:  # other packages look for it too
        del sys.modules[name]
    return timm
