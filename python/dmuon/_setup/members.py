"""The parameters of a group as users give them: by name, by a choice, or taken from the model at any time."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from dmuon._setup.leaf import Leaf
from dmuon._setup.place import clean_name, joined
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.shown import shown

_WANTED = {
    "muon": "matrices that Muon updates, each once",
    "adamw": "parameters that AdamW updates, each once",
}
_TITLES = {"muon": "Muon", "adamw": "AdamW"}


def former_parameters(model: nn.Module) -> WeakIdKeyDictionary:
    """Returns the names of the parameters that `fully_shard` or Muon may replace, so that dmuon knows them later.

    Holds none of them: their memory ends with their last user. Skips what must have no weak references.
    """
    former = WeakIdKeyDictionary()
    former.update({p: clean_name(name) for name, p in model.named_parameters() if not is_swapped(p)})
    return former


def is_swapped(parameter: torch.Tensor) -> bool:
    """True if `Module.to` swaps the parameter, which PyTorch refuses for a tensor with a weak reference."""
    return is_traceable_wrapper_subclass(parameter) or torch.__future__.get_swap_module_params_on_conversion()


def note_former(former: WeakIdKeyDictionary, leaves: Sequence[Leaf]) -> None:
    """Adds what stands for the leaves now: the objects that the model shows, and that it showed before."""
    for leaf in leaves:
        former.update(dict.fromkeys(_objects_of(leaf), leaf.name))


@dataclasses.dataclass(frozen=True, eq=False)
class Member:
    """A parameter that a group can have."""

    name: str
    module: nn.Module | None  # the first that holds it; None: the model does not
    parameter: torch.Tensor  # as the model shows it now
    leaf: int | None  # its index, if Muon updates it

    @property
    def algorithm(self) -> str:
        return "adamw" if self.leaf is None else "muon"


class Members:
    """All parameters of a dedicated model as it is now, before or after Muon. Made anew for each use."""

    def __init__(
        self, model: nn.Module, leaves: Sequence[Leaf], former: Mapping[torch.Tensor, str], replaced: Mapping[int, str]
    ) -> None:
        """`former`, and `replaced` by FSDP2's numbers: names of parameters that the model had before."""
        self._former, self._replaced = former, replaced
        self._by_id: dict[int, Member] = {}  # by each object that stands for it
        self._by_name: dict[str, list[Member]] = {}  # by its names, and by those of the modules around it
        for index, leaf in enumerate(leaves):
            objects, place = _objects_of(leaf), leaf.places[0]
            member = Member(leaf.name, place.module, objects[-1], index)
            self._by_id |= dict.fromkeys(map(id, objects), member)
            for place in leaf.places:
                self._note_name(place.name, member)
        for path, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = clean_name(joined(path, attribute))
                known = self._by_id.setdefault(id(parameter), Member(name, module, parameter, None))
                if known.leaf is None:
                    self._note_name(name, known)

    def of(self, algorithm: str) -> list[Member]:
        """Returns the members that an algorithm trains, matrices by their index, others in the model's order."""
        return [m for m in dict.fromkeys(self._by_id.values()) if m.algorithm == algorithm and _is_trained(m)]

    def resolved(self, params: Any, algorithm: str, where: str, with_others: bool = False) -> list[Member]:
        """Returns the members that `params`, given for a group of `algorithm`, means.

        Args:
            params: a name, a parameter, or several. Or a function of name, module and parameter that returns True for
                those that it means. The name of a module means the parameters below it that `algorithm` trains. In
                names `*`, `?` and `[...]` match as in fnmatch.
            algorithm: "muon" or "adamw".
            where: names the group in messages.
            with_others: True to allow parameters that the model does not have.

        Raises:
            ValueError: `params` means another algorithm's parameter, one twice, or nothing.
        """

        def refuse(number: int | None, got: str) -> NoReturn:
            place = "params" if number is None else f"params[{number}]"
            raise ValueError(f"{where}: {place}: expected {_WANTED[algorithm]}, got {got}")

        if callable(params) and not isinstance(params, nn.Module | torch.Tensor):
            return self._chosen(params, algorithm, where) or refuse(None, "a choice of none")
        if isinstance(params, str | torch.Tensor):
            params = [params]
        if not isinstance(params, Iterable) or isinstance(params, nn.Module | set | frozenset | dict):
            raise ValueError(
                f"{where}: params: expected names, parameters, or a function of name, module and parameter, in an "
                f"order, got {shown(params)}"
            )
        found: dict[Member, None] = {}
        for number, item in enumerate(params):
            item = item[1] if isinstance(item, tuple) and len(item) == 2 else item
            means = self._meant(item, algorithm, with_others)
            if isinstance(means, str):
                if not isinstance(item, str | torch.Tensor):
                    raise ValueError(f"{where}: params[{number}]: expected a parameter of the model, got {means}")
                refuse(number, means)
            for member in means:
                if member in found:
                    refuse(number, f"'{member.name}' twice")
                found[member] = None
        return list(found)

    def _meant(self, item: Any, algorithm: str, with_others: bool) -> list[Member] | str:
        """Returns the members that an item means, or what is wrong with it."""
        if isinstance(item, str):
            return self._named(item, algorithm)
        if not isinstance(item, torch.Tensor):
            return shown(item)
        member = self._by_id.get(id(item))
        if member is None and (name := self._former.get(item)) is not None:
            member = next((m for m in self._by_name.get(name, ()) if m.name == name and _has_become(item, m)), None)
            if member is None:
                return f"'{name}' as it was before, which is no parameter of the model any more"
        if member is None and (number := getattr(item, "_fsdp_orig_uid", None)) is not None:
            what = f"'{self._replaced[number]}'" if number in self._replaced else shown(item)
            return f"{what} as it was before fully_shard, which has replaced it. Take it from the model again"
        if member is None:
            if with_others and not isinstance(item, OwnedTensor):
                return [Member(f"a parameter of shape {tuple(item.shape)}", None, item, None)]
            return f"{shown(item)}, which is no parameter of the model as it is after fully_shard"
        return [member] if member.algorithm == algorithm else _of_the_other(member)

    def _named(self, item: str, algorithm: str) -> list[Member] | str:
        names = [name] if (name := clean_name(item)) in self._by_name else fnmatch.filter(self._by_name, item)
        members = list(dict.fromkeys(member for name in names for member in self._by_name[name]))
        fitting = [m for m in members if m.algorithm == algorithm and (_is_trained(m) or m.name == name)]
        if fitting:
            return fitting
        if members and [member.name for member in members] == names:
            return _of_the_other(members[0])
        return f"'{item}', a name of no such parameter, nor of a module around one"

    def _chosen(self, choice: Any, algorithm: str, where: str) -> list[Member]:
        chosen = []
        for member in self.of(algorithm):
            try:
                answer = choice(member.name, member.module, member.parameter)
            except Exception as error:  # the user's own
                raise ValueError(
                    f"{where}: params: raised {type(error).__name__} for '{member.name}': {error}"
                ) from error
            if not isinstance(answer, bool):
                raise ValueError(f"{where}: params: expected True or False for '{member.name}', got {shown(answer)}")
            chosen += [member] if answer else []
        return chosen

    def _note_name(self, name: str, member: Member) -> None:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            held = self._by_name.setdefault(".".join(parts[:length]), [])
            if member not in held[-1:]:
                held.append(member)


def _objects_of(leaf: Leaf) -> list[torch.Tensor]:
    """Returns the objects that stand for a leaf, last what the model shows."""
    of_places = [
        shown_there
        for place in reversed(leaf.places)
        for shown_there in (
            place.provisional,
            vars(place.module).get(place.attribute),
            place.module._parameters.get(place.attribute),
        )
    ]
    return [found for found in (leaf.parameter, *of_places) if isinstance(found, torch.Tensor)]


def _is_trained(member: Member) -> bool:
    return member.leaf is not None or member.parameter.requires_grad


def _has_become(former: torch.Tensor, member: Member) -> bool:
    """True if `fully_shard`, Muon or `to_empty` has put the member in the place of `former`, rather than the user."""
    return member.leaf is not None or isinstance(member.parameter, DTensor) or former.is_meta


def _of_the_other(member: Member) -> str:
    return (
        f"'{member.name}', which {_TITLES[member.algorithm]} updates (dedicate_params(select=...) decides; its groups "
        f"are {member.algorithm}_groups of dmuon.Muon)"
    )
