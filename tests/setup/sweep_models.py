"""Routes every model that Transformers and timm build from their own defaults, on the meta device.

    python tests/setup/sweep_models.py            all of them, in some ten minutes on one core
    python tests/setup/sweep_models.py Bert vit   those whose name contains one of these

Fails if Muon gets what no list here expects. Prints kinds of parameters to read: heads, and what no rule knows.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import transformers
from dmuon._setup.routing import route
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
from timm_alone import import_timm

LAYERS = re.compile("(num_|n_)?((encoder|decoder|hidden)_)?(layers?|depth)")
SECONDS = 40
MULTIPLY = (nn.Linear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase, Conv1D)

Build = Callable[[], nn.Module]


def shallow(config: PretrainedConfig) -> PretrainedConfig:
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            shallow(value)
        elif LAYERS.fullmatch(name) and type(value) is int and value > 2:
            setattr(config, name, 2)
    return config


def of_transformers() -> Iterator[tuple[str, list[Build]]]:
    for package in pkgutil.iter_modules(transformers.models.__path__, "transformers.models."):
        try:
            path = importlib.import_module(package.name).__path__
            names = [f"{package.name}.{m.name}" for m in pkgutil.iter_modules(path) if m.name.startswith("modeling_")]
            modules = [importlib.import_module(name) for name in names]
        except (ImportError, AttributeError) as error:  # needs a package that is not there
            print(f"left out: {package.name}: {error}")
            continue
        for module in modules:
            for name, cls in vars(module).items():
                if not (
                    inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
                ):
                    continue
                if cls.config_class is not None and not name.endswith("PreTrainedModel"):
                    yield name, [lambda c=cls: c(shallow(c.config_class())), lambda c=cls: c(c.config_class())]


def of_timm() -> Iterator[tuple[str, list[Build]]]:
    timm = import_timm()
    for name in timm.list_models():
        yield name, [lambda n=name: timm.create_model(n)]


def built(builds: list[Build]) -> nn.Module | None:
    def too_long(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    for build in builds:
        signal.alarm(SECONDS)
        try:
            with torch.device("meta"):
                return build()
        except Exception:  # its defaults are not meant to be built
            continue
        finally:
            signal.alarm(0)
    return None


def expected(model: nn.Module, name: str, shape: tuple[int, ...]) -> bool:
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    cls = type(module).__name__
    if len(shape) == 3:
        return "expert" in f"{cls} {path.rpartition('.')[2]}".lower() and min(shape[1:]) > 1
    router = cls.endswith("Router") and attribute == "weight"
    return len(shape) == 2 and min(shape) > 1 and "bias" not in attribute and (isinstance(module, MULTIPLY) or router)


def main(parts: list[str]) -> int:
    transformers.logging.set_verbosity_error()
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    wrong, unbuilt, number = [], [], 0
    for name, builds in [*of_transformers(), *of_timm()]:
        if parts and not any(part in name for part in parts):
            continue
        model = built(builds)
        if model is None:
            unbuilt.append(name)
            continue
        number += 1
        for row in route(model, None)[1]:
            if row.algorithm == "muon" and not expected(model, row.name, row.shape):
                wrong.append(f"{name}: {row.name} {row.shape}")
            elif "output head" in row.why or (row.unknown and len(row.shape) < 4):
                why = re.sub("'.*'", "", row.why)
                kinds[why, re.sub(r"\b\d+\b", "*", row.name)].append(name)
    for (why, parameter), names in sorted(kinds.items()):
        print(f"{why:45} {parameter}  ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})")
    print(f"{number} models routed; {len(unbuilt)} could not be built: {' '.join(unbuilt)}")
    print(*wrong, f"{len(wrong)} parameters are Muon's and should not be", sep="\n")
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
