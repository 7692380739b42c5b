"""Which module's hooks move a leaf."""

from __future__ import annotations

import dataclasses
import itertools

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon._setup.place import clean_name


@dataclasses.dataclass(frozen=True)
class Unit:
    """A module whose hooks move `leaves` (indices in module order, ascending) together; there may be none."""

    name: str  # in the model without wrappers
    module: nn.Module
    leaves: tuple[int, ...]
    host: bool = False  # fully_shard manages parameters in it, so that no rank may skip it by itself

    @property
    def label(self) -> str:
        """Its name where people read it."""
        return self.name or "(root)"


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
    """Groups leaves into units, in module order.

    Args:
        root: the model.
        module_paths: for each leaf a path of every module that holds it. A leaf tied across units, or in a module
            that several units share, belongs to their lowest common ancestor.
    """
    aliases: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        aliases.setdefault(module, []).append(path)
    members: dict[str, list[int]] = {}
    for leaf, paths in enumerate(module_paths):
        everywhere = [alias for path in paths for alias in aliases[root.get_submodule(path)]]
        found = [_path_to_unit(root, path) for path in everywhere]
        # A unit that is used in several places is one.
        units = {root.get_submodule(path): path for path in reversed(found)}
        levels = zip(*(path.split(".") for path in units.values()), strict=False)
        common = itertools.takewhile(lambda names: len(set(names)) == 1, levels)
        path = _with_forward(root, ".".join(names[0] for names in common))
        members.setdefault(path, []).append(leaf)
    order = {name: place for place, (name, _) in enumerate(root.named_modules(remove_duplicate=False))}
    host = _host_paths(root)
    # Those without leaves come last: plans know the others by their places.
    paths = [*sorted(members, key=order.__getitem__), *sorted(host - members.keys(), key=order.__getitem__)]
    return [
        Unit(clean_name(path), root.get_submodule(path), tuple(members.get(path, ())), path in host) for path in paths
    ]


def _host_paths(root: nn.Module) -> set[str]:
    """Of the modules, blocks mostly, in which `fully_shard` manages parameters."""
    found = set()
    for path, module in root.named_modules():
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            unit = _with_forward(root, _path_to_unit(root, path))
            alone = unit == path and not isinstance(module, FSDPModule) and not _is_item(root, path)
            found.add("" if alone else unit)  # what stands alone in the model, its head say, is the root's
    return found


def _is_item(root: nn.Module, path: str) -> bool:
    """Whether the module is one of a list."""
    return isinstance(root.get_submodule(path.rpartition(".")[0]), nn.ModuleList | nn.Sequential)
