"""Which module's hooks move a matrix."""

from __future__ import annotations

import dataclasses
import itertools

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from dmuon._setup.place import clean_name


@dataclasses.dataclass(frozen=True)
class Unit:
    """A module whose hooks move `matrices` (indices in module order, ascending) together."""

    name: str  # in the model without wrappers
    module: nn.Module
    matrices: tuple[int, ...]


def _path_to_unit(root: nn.Module, path: str) -> str:
    """The path of the unit of a parameter that sits in the module at `path`.

    The innermost FSDPModule below the root; else the outermost item of a ModuleList or Sequential; else
    the module itself.
    """
    names = path.split(".") if path else []
    prefixes = [".".join(names[:depth]) for depth in range(len(names) + 1)]
    modules = [root.get_submodule(prefix) for prefix in prefixes]
    for depth in range(len(names), 0, -1):
        if isinstance(modules[depth], FSDPModule):
            return prefixes[depth]
    for parent, prefix in zip(modules, prefixes[1:], strict=False):
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            return prefix
    return path


def _with_forward(root: nn.Module, path: str) -> str:
    """`path`, or its closest ancestor that is called: hooks of a bare container never run."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    while path:
        parent = path.rpartition(".")[0]
        # MultiheadAttention reads its projection's weight without calling the projection.
        if not (
            isinstance(root.get_submodule(path), containers)
            or isinstance(root.get_submodule(parent), nn.MultiheadAttention)
        ):
            break
        path = parent
    return path


def find_units(root: nn.Module, module_paths: list[list[str]]) -> list[Unit]:
    """Groups matrices into units, in module order.

    Args:
        root: the model.
        module_paths: for each matrix the paths of the modules that hold it, one for each alias. A matrix tied
            across units belongs to their lowest common ancestor.
    """
    members: dict[str, list[int]] = {}
    for matrix, paths in enumerate(module_paths):
        levels = zip(*(_path_to_unit(root, path).split(".") for path in paths), strict=False)
        common = itertools.takewhile(lambda names: len(set(names)) == 1, levels)
        path = _with_forward(root, ".".join(names[0] for names in common))
        members.setdefault(path, []).append(matrix)
    order = {name: place for place, (name, _) in enumerate(root.named_modules(remove_duplicate=False))}
    return [
        Unit(clean_name(path), root.get_submodule(path), tuple(members[path]))
        for path in sorted(members, key=order.__getitem__)
    ]
