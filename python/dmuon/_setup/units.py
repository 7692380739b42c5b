"""Which module's hooks move a matrix."""

from __future__ import annotations

import dataclasses

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
    modules = [root]
    for name in names:
        modules.append(modules[-1].get_submodule(name))
    for depth in range(len(names), 0, -1):
        if isinstance(modules[depth], FSDPModule):
            return ".".join(names[:depth])
    for depth in range(1, len(names) + 1):
        if isinstance(modules[depth - 1], nn.ModuleList | nn.Sequential):
            return ".".join(names[:depth])
    return path


def _common_ancestor(paths: list[str]) -> str:
    split = [path.split(".") if path else [] for path in paths]
    common: list[str] = []
    for names in zip(*split, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return ".".join(common)


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
        path = _with_forward(root, _common_ancestor([_path_to_unit(root, path) for path in paths]))
        members.setdefault(path, []).append(matrix)
    order = {name: place for place, (name, _) in enumerate(root.named_modules(remove_duplicate=False))}
    return [
        Unit(clean_name(path), root.get_submodule(path), tuple(members[path]))
        for path in sorted(members, key=order.__getitem__)
    ]
