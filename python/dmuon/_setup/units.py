"""Units: modules whose hooks move their leaves."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon._setup.place import clean_name
from dmuon._setup.shown import shown


@dataclasses.dataclass(frozen=True)
class Unit:
    """Leaves that move together, and the modules whose calls move them.

    `leaves` are ascending indices in module order, maybe none. If one module alone is called, its call is the unit's
    use. Of several, each call reads the weights, and the use lasts from the first call to the last.
    """

    name: str  # path of the first module in the model without wrappers
    modules: tuple[nn.Module, ...]
    leaves: tuple[int, ...]
    host: bool = False  # fully_shard manages parameters in it, so no rank may skip it alone

    @property
    def label(self) -> str:
        """The name for people."""
        return self.name or "(root)"


Units = Callable[[str, nn.Module], bool] | Sequence[nn.Module | Sequence[nn.Module]] | None
Groups = Mapping[nn.Module, tuple[nn.Module, ...]]


def chosen_units(model: nn.Module, units: Units) -> list[tuple[nn.Module, ...]]:
    """Returns the modules of each unit that the user has chosen, see `dedicate_params`.

    Raises:
        ValueError: `units` is neither a predicate nor such a list, or a module is not the model's or has two units.
    """
    names = {module: name for name, module in model.named_modules()}
    if callable(units):
        return [(module,) for module, name in names.items() if _is_chosen(units, clean_name(name), module)]
    chosen: list[tuple[nn.Module, ...]] = []
    seen: set[nn.Module] = set()
    for entry in _listed(units):
        modules = (entry,) if isinstance(entry, nn.Module) else tuple(_listed(entry))
        for module in modules:
            if not isinstance(module, nn.Module) or module not in names:
                raise ValueError(f"dedicate_params: units: expected modules of the model, got {module!r:.200}")
            if module in seen:
                raise ValueError(f"dedicate_params: units: expected '{names[module]}' in one unit, got it in two")
            seen.add(module)
        if modules:
            chosen.append(modules)
    return chosen


def _is_chosen(units: Callable[[str, nn.Module], bool], name: str, module: nn.Module) -> bool:
    try:
        answer = units(name, module)
    except Exception as error:  # the user's own
        raise ValueError(f"dedicate_params: units: raised {type(error).__name__} for '{name}': {error}") from error
    if not isinstance(answer, bool | None):
        raise ValueError(f"dedicate_params: units: expected True or False for '{name}', got {shown(answer)}")
    return bool(answer)


def _listed(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value
    raise ValueError(
        "dedicate_params: units: expected a function of (name, module), or a list of modules and of lists of modules, "
        f"got {value!r:.200}"
    )


def _groups(root: nn.Module, chosen: Sequence[tuple[nn.Module, ...]]) -> Groups:
    """Returns, for each module of a unit of several modules or that the user chose, the modules of its unit."""
    groups: dict[nn.Module, tuple[nn.Module, ...]] = {}
    for module in root.modules():
        if isinstance(module, FSDPModule):
            groups[module] = tuple(module._get_fsdp_state()._modules)  # fully_shard([a, b]) is one
    for modules in chosen:
        groups.update(dict.fromkeys(modules, modules))
    return groups


class _Finder:
    """Finds the units of a model's modules, by paths."""

    def __init__(self, root: nn.Module, chosen: Sequence[tuple[nn.Module, ...]]) -> None:
        self._root = root
        self._chosen = {module for modules in chosen for module in modules}
        self._groups = _groups(root, chosen)
        self._first: dict[tuple[nn.Module, ...], str] = {}  # path of a group's first module
        for path, module in root.named_modules():
            if module in self._groups:
                self._first.setdefault(self._groups[module], path)

    def modules(self, path: str) -> tuple[nn.Module, ...]:
        """Returns the modules of the unit at a path of `path_to_unit` or `closest_called`."""
        module = self._root.get_submodule(path)
        return self._groups.get(module, (module,))

    def path_to_unit(self, path: str) -> str:
        """Returns the path of the unit that holds the parameters of the module at `path`.

        The unit is the innermost module that the user chose. Without one, it is the innermost FSDPModule below the
        root. Without that, it is the outermost item of a ModuleList or Sequential, or else the module itself. A unit
        of several modules is at its first one.
        """
        names = path.split(".") if path else []
        prefixes = [".".join(names[:depth]) for depth in range(len(names) + 1)]
        modules = [self._root.get_submodule(prefix) for prefix in prefixes]
        inner_first = list(zip(reversed(modules), reversed(prefixes), strict=True))
        chosen = [module for module, _ in inner_first if module in self._chosen]
        sharded = [module for module, prefix in inner_first if isinstance(module, FSDPModule) and prefix]
        for module in (*chosen, *sharded):
            return self._first[self._groups[module]]
        for parent, prefix in zip(modules, prefixes[1:], strict=False):
            if isinstance(parent, nn.ModuleList | nn.Sequential):
                return prefix
        return path

    def closest_called(self, path: str) -> str:
        """Returns `path` or its closest ancestor that is called: a container without a forward never is."""
        containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
        while path:
            parent = path.rpartition(".")[0]
            module = self._root.get_submodule(path)
            is_bare = isinstance(module, containers) and type(module).forward is nn.Module.forward
            # MultiheadAttention reads its projection's weight without calling the projection.
            is_read = isinstance(self._root.get_submodule(parent), nn.MultiheadAttention)
            if module in self._chosen or not (is_bare or is_read):
                break
            path = parent
        return path

    def apart(self, path: str, unit: str) -> str:
        """Returns the path at which the module at `path` is a unit of its own, or `unit` if it is a unit's module."""
        path = self.closest_called(path)
        return unit if self._root.get_submodule(path) in self._groups else path

    def host_paths(self) -> set[str]:
        """Returns the paths of units, mostly blocks, in which `fully_shard` manages parameters."""
        found = set()
        for path, module in self._root.named_modules():
            if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
                unit = self.closest_called(self.path_to_unit(path))
                alone = unit == path and module not in self._groups and not self._is_item(path)
                found.add("" if alone else unit)  # a module alone in the model, such as the head, belongs to the root
        return found

    def _is_item(self, path: str) -> bool:
        return isinstance(self._root.get_submodule(path.rpartition(".")[0]), nn.ModuleList | nn.Sequential)


def find_units(
    root: nn.Module,
    module_paths: list[list[str]],
    chosen: Sequence[tuple[nn.Module, ...]] = (),
    dtypes: Sequence[torch.dtype] = (),
) -> list[Unit]:
    """Groups leaves into units, in module order.

    Args:
        root: the model.
        module_paths: for each leaf, the path of every module that holds it. A leaf belongs to the lowest common
            ancestor of these units if it is tied across units, or if units share its module.
        chosen: the modules of each unit that the user chose.
        dtypes: for each leaf, the dtype in which it travels. Of a unit with several, the most frequent stays. Each
            module with another dtype becomes a unit, because a unit has one buffer. Empty: all leaves have one dtype.
    """
    finder = _Finder(root, chosen)
    aliases: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        aliases.setdefault(module, []).append(path)
    members: dict[str, list[int]] = {}
    for leaf, paths in enumerate(module_paths):
        everywhere = [alias for path in paths for alias in aliases[root.get_submodule(path)]]
        found = [finder.path_to_unit(path) for path in everywhere]
        # A unit that stands in several places counts once.
        units = {root.get_submodule(path): path for path in reversed(found)}
        levels = zip(*(path.split(".") for path in units.values()), strict=False)
        common = itertools.takewhile(lambda names: len(set(names)) == 1, levels)
        path = finder.closest_called(".".join(names[0] for names in common))
        members.setdefault(path, []).append(leaf)
    for unit, leaves in list(members.items()) if dtypes else ():
        usual = collections.Counter(dtypes[leaf] for leaf in leaves).most_common(1)[0][0]
        members[unit] = [leaf for leaf in leaves if dtypes[leaf] == usual]
        for leaf in leaves:
            if dtypes[leaf] != usual:
                members.setdefault(finder.apart(module_paths[leaf][0], unit), []).append(leaf)
    order = {name: place for place, (name, _) in enumerate(root.named_modules(remove_duplicate=False))}
    host = finder.host_paths()
    # Units without leaves come last: plans know the others by their index.
    paths = [*sorted(members, key=order.__getitem__), *sorted(host - members.keys(), key=order.__getitem__)]
    return [Unit(clean_name(path), finder.modules(path), tuple(members.get(path, ())), path in host) for path in paths]
