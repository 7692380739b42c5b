"""A model that was built on the meta device, from dedicate_params to Muon: it gets memory, then values."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn

from dmuon._setup.place import Place, restore_order
from dmuon._setup.provisional import Desk, InitialValues, ProvisionalTensor
from dmuon._setup.random_shards import close_draws, open_draws
from dmuon._setup.ranks import Ranks
from dmuon._setup.routing import Matrix


class MetaStart:
    """Gives the matrices memory at one rank each, as soon as `to_empty` has given their modules a device.

    From then on a module shows its matrices, so that the model's own initialisation finds them, and runs there.
    """

    def __init__(
        self, model: nn.Module, matrices: Sequence[Matrix], known: Mapping[nn.Module, list[str]], ranks: Ranks
    ) -> None:
        """`matrices`: all of the model, by now taken out of it; of these, the ones on the meta device."""
        self._known, self._here = known, ranks.everyone[ranks.slot]
        self._desk = Desk(self._here)
        self.values: dict[int, InitialValues] = {}
        self._shown: dict[int, nn.Parameter] = {}
        self._holders: dict[nn.Module, list[tuple[int, Place]]] = {}
        held = dict.fromkeys(ranks.everyone, 0)  # elements at each rank
        for index, matrix in sorted(enumerate(matrices), key=lambda entry: -entry[1].shape.numel()):
            if not matrix.parameter.is_meta:
                continue
            holder = min(held, key=held.__getitem__)
            held[holder] += matrix.shape.numel()
            self.values[index] = InitialValues(matrix.name, matrix.shape, matrix.parameter.dtype, holder)
        for index in sorted(self.values):
            for place in matrices[index].places:
                self._holders.setdefault(place.module, []).append((index, place))
        for module in self._holders:
            _wrap_apply(module, self)
        open_draws()
        self._finalizer = weakref.finalize(model, close_draws)  # though Muon may never come

    def hide(self, module: nn.Module) -> None:
        """For a cast or move of the module, which only the sentinels follow."""
        for _, place in self._holders[module]:
            place.hide_provisional()

    def show(self, module: nn.Module) -> None:
        """After a cast or move: shows the matrices that have a device by now."""
        for index, place in self._holders[module]:
            device = place.sentinel().device
            if device.type != "meta":
                place.show_provisional(self._parameter(index, device))
        restore_order(module, self._known[module])

    def _parameter(self, index: int, device: torch.device) -> nn.Parameter:
        shown = self._shown.get(index)
        if shown is None or shown.device != device:
            values = self.values[index]
            if values.base.is_meta and values.holder == self._here:
                values.base = torch.empty_like(values.base, device=device)
            elif not values.base.is_meta:
                values.base = values.base.to(device)
            shown = self._shown[index] = nn.Parameter(ProvisionalTensor(values, self._desk, device))
        return shown

    def taken(self, index: int) -> torch.Tensor | None:
        """The values of a matrix, which are forgotten here; None where another rank keeps them."""
        self._desk.clear()
        self._shown.pop(index, None)
        values = self.values[index]
        base, values.base = values.base, values.base.to("meta")
        return None if base.is_meta else base

    def facts(self) -> list[str]:
        """What must be equal on all ranks when Muon is made."""
        return [f"'{values.name}' initialised by {values.history()}" for values in self.values.values()]

    def end(self) -> None:
        """Muon has put placeholders where the matrices were shown."""
        for module in self._holders:
            module.__dict__.pop("_apply", None)
        self._holders.clear()
        self._finalizer()


def _wrap_apply(module: nn.Module, start: MetaStart) -> None:
    """`to_empty`, `to` and their like all go through `_apply`, of this module or of one around it."""

    def apply(*args: Any, **kwargs: Any) -> nn.Module:
        start.hide(module)
        try:
            type(module)._apply(module, *args, **kwargs)
        finally:
            start.show(module)
        return module

    module.__dict__["_apply"] = apply
