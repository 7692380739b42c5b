"""The start of a model that was built on the meta device, from dedicate_params to Muon: memory, then values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._setup.attributes import OWN, give_attributes
from dmuon._setup.initial_values import AtHolder, InitialValues, InShards
from dmuon._setup.leaf import Leaf
from dmuon._setup.place import Place, clean_name, joined, restore_order
from dmuon._setup.provisional import Desk, ProvisionalTensor
from dmuon._setup.ranks import Ranks
from dmuon._setup.replaced_method import ReplacedMethod


class MetaStart:
    """Gives parameters the values that one process would give them.

    Once `to_empty` has given a module a device, the module shows provisional parameters, for the model's own
    initialisation. They stand for leaves, which one rank stores, and for the DTensors of `fully_shard`.
    """

    def __init__(
        self, model: nn.Module, leaves: Sequence[Leaf], known: Mapping[nn.Module, Iterable[str]], ranks: Ranks
    ) -> None:
        """Starts those of `leaves` that are on the meta device. All leaves were taken out of the model."""
        self._known, self._desk = known, Desk()
        self._names = {module: path for path, module in model.named_modules()}
        self._had_values = {
            (module, name)
            for module in known
            for name, p in module._parameters.items()
            if p is not None and not p.is_meta
        }
        self.values: dict[int, AtHolder] = {}
        self._shown: dict[int, nn.Parameter] = {}
        self._places: dict[nn.Module, list[tuple[int, Place]]] = {}
        self._sharded: dict[int, tuple[DTensor, nn.Parameter]] = {}  # DTensor and stand-in, by the stand-in's id
        held = dict.fromkeys(ranks.everyone, 0)  # elements at each rank
        for index, leaf in sorted(enumerate(leaves), key=lambda entry: -entry[1].shape.numel()):
            if leaf.parameter.is_meta:
                holder = min(held, key=held.__getitem__)
                held[holder] += leaf.shape.numel()
                self.values[index] = AtHolder(leaf.name, leaf.parameter, holder, ranks.here)
                for place in leaf.places:
                    self._places.setdefault(place.module, []).append((index, place))
        # `to_empty`, `to` and similar methods, of the module or of one around it, all call `_apply`.
        self._replaced = [ReplacedMethod(module, "_apply", self._apply) for module in known]
        self._moving: list[nn.Module] = []  # modules whose cast or move is under way

    def _apply(self, inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        is_outermost = not self._moving
        self._moving.append(module)
        self._hide(module)
        before = {name: vars(p) for name, p in module._parameters.items() if p is not None}
        try:
            inner(*args, **kwargs)
        finally:
            for name, parameter in module._parameters.items():
                if parameter is not None:  # to_empty makes a new one, or gives this one the attributes of a new one
                    give_attributes(parameter, before.get(name, {}))
            if is_outermost:  # fully_shard looks at the parameters of all modules inside its own
                for moved in self._moving:
                    self._show(moved)
                self._moving.clear()
        return module

    def _hide(self, module: nn.Module) -> None:
        """Hides provisional parameters from a cast or move, which must see sentinels and DTensors alone."""
        self._desk.clear()
        for _, place in self._places.get(module, ()):
            place.hide_provisional()
        self._hide_sharded(module)

    def _show(self, module: nn.Module) -> None:
        """Shows provisional parameters that have a device by now, after a cast or move."""
        for index, place in self._places.get(module, ()):
            device = place.sentinel().device
            if device.type != "meta" and not place.is_replaced():
                place.show_provisional(self._provisional(index, device))
        self._show_sharded(module)
        restore_order(module, self._known[module])

    def _hide_sharded(self, module: nn.Module) -> None:
        for attribute, parameter in module._parameters.items():
            if id(parameter) in self._sharded:  # also in places where the user has tied it
                module._parameters[attribute] = self._behind(parameter)

    def _show_sharded(self, module: nn.Module) -> None:
        for attribute, parameter in module._parameters.items():
            if isinstance(parameter, DTensor) and not parameter.is_meta:
                module._parameters[attribute] = self._stand_in(module, attribute, parameter)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Puts DTensors in their places, and back out if the block raises."""
        self._desk.clear()
        for module in self._known:
            self._hide_sharded(module)
        try:
            yield
        except Exception:
            for module in self._known:
                self._show_sharded(module)
            raise

    def resolved(self, groups: Any) -> Any:
        """Returns parameter groups with DTensors in place of their stand-ins."""
        if isinstance(groups, dict):
            return {key: self.resolved(value) for key, value in groups.items()}
        if isinstance(groups, list | tuple):
            return type(groups)(self.resolved(value) for value in groups)
        return self._sharded[id(groups)][0] if id(groups) in self._sharded else groups

    def taken(self, index: int) -> torch.Tensor | None:
        """Returns the values of a leaf and frees them here. None if another rank has them."""
        self._shown.pop(index, None)
        values = self.values[index]
        base, values.base = values.base, values.base.to("meta")
        return None if base.is_meta else base

    def facts(self) -> list[str]:
        """Returns the lines that must be equal on all ranks when Muon is made."""
        shown: list[InitialValues] = [*self.values.values()]
        shown += [parameter._initial for _, parameter in self._sharded.values()]  # type: ignore[attr-defined]
        return [values.fact() for values in shown]

    def is_trainable(self, index: int) -> bool:
        """True if the user has not frozen the leaf's provisional parameter."""
        return index not in self._shown or self._shown[index].requires_grad

    def end(self) -> None:
        """Ends the start, because Muon has put placeholders in."""
        for replaced in self._replaced:
            replaced.remove()
        self._places.clear()
        self._sharded.clear()

    def _provisional(self, index: int, device: torch.device) -> nn.Parameter:
        shown = self._shown.get(index)
        if shown is None or shown.device != device:
            self.values[index].move(device)
            shown = self._shown[index] = nn.Parameter(ProvisionalTensor(self.values[index], self._desk, device))
        return shown

    def _stand_in(self, module: nn.Module, attribute: str, sharded: Any) -> nn.Parameter:
        for other, stand_in in self._sharded.values():
            if other is sharded and stand_in.device == sharded.device:
                return stand_in
        name = clean_name(joined(self._names[module], attribute))
        values = InShards(name, sharded, (module, attribute) in self._had_values)
        made = nn.Parameter(ProvisionalTensor(values, self._desk, sharded.device), sharded.requires_grad)
        give_attributes(made, vars(sharded))
        self._sharded[id(made)] = (sharded, made)
        return made

    def _behind(self, stand_in: Any) -> Any:
        """Returns the DTensor, with the attributes that the user has set on its stand-in."""
        sharded = self._sharded[id(stand_in)][0]
        sharded.requires_grad_(stand_in.requires_grad)
        vars(sharded).update({key: value for key, value in vars(stand_in).items() if key not in OWN})
        return sharded
