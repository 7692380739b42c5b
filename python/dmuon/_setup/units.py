"""Units: modules whose hooks move their leaves."""

from __future__ import annotations

import dataclasses
import itertools

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon._setup.place import clean_name


@dataclasses.dataclass(frozen=True)
class Unit:
    """A module whose hooks move `leaves` together: ascending indices in module order, maybe none."""

    name: str  # path in the model without wrappers
    module: nn.Module
    leaves: tuple[int, ...]
    host: bool = False  # fully_shard manages parameters in it, so no rank may skip it alone

    @property
    def label(self) -> str:
        """The name for people."""
        return self.name or "(root)"


def _path_to_unit(root: nn.Module, path: str) -> str:
    """Returns the path of the unit that holds the parameters of the module at `path`.

    The unit is the innermost FSDPModule below the root. Without one, it is the outermost item of a ModuleList or
    Sequential. Without that, it is the module itself.
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
    """Returns `path` or its closest ancestor that is called: hooks of a bare container never run."""
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
        module_paths: for each leaf, the path of every module that holds it. A leaf belongs to the lowest common
            ancestor of these units if it is tied across units, or if units share its module.
    """
    aliases: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        aliases.setdefault(module, []).append(path)
    members: dict[str, list[int]] = {}
    for leaf, paths in enumerate(module_paths):
        everywhere = [alias for path in paths for alias in aliases[root.get_submodule(path)]]
        found = [_path_to_unit(root, path) for path in everywhere]
        # A unit that stands in several places counts once.
        units = {root.get_submodule(path): path for path in reversed(found)}
        levels = zip(*(path.split(".") for path in units.values()), strict=False)
        common = itertools.takewhile(lambda names: len(set(names)) == 1, levels)
        path = _with_forward(root, ".".join(names[0] for names in common))
        members.setdefault(path, []).append(leaf)
    order = {name: place for place, (name, _) in enumerate(root.named_modules(remove_duplicate=False))}
    host = _host_paths(root)
    # Units without leaves come last: plans know the others by their index.
    paths = [*sorted(members, key=order.__getitem__), *sorted(host - members.keys(), key=order.__getitem__)]
    return [
        Unit(clean_name(path), root.get_submodule(path), tuple(members.get(path, ())), path in host) for path in paths
    ]


def _host_paths(root: nn.Module) -> set[str]:
    """Returns the paths of units, mostly blocks, in which `fully_shard` manages parameters."""
    found = set()
    for path, module in root.named_modules():
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            unit = _with_forward(root, _path_to_unit(root, path))
            alone = unit == path and not isinstance(module, FSDPModule) and not _is_item(root, path)
            found.add("" if alone else unit)  # a module alone in the model, such as the head, belongs to the root
    return found


def _is_item(root: nn.Module, path: str) -> bool:
    """True if the module is an item of a list."""
    return isinstance(root.get_submodule(path.rpartition(".")[0]), nn.ModuleList | nn.Sequential)
