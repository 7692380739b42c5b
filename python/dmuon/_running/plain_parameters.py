"""The parameters of AdamW that neither dmuon nor fully_shard manages: which of their gradients travel."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon import _C
from dmuon._running.blocking import blocking_message
from dmuon._setup.agreement import agreement
from dmuon._setup.checksum import checksum
from dmuon._setup.place import clean_name
from dmuon._setup.ranks import Ranks


class PlainParameters:
    """Every rank has them whole, in one order. The gradients of those that train travel, alike on all ranks.

    Iterating goes through all of them, in the order of the groups.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, engine: _C.Engine) -> None:
        self._model, self._ranks, self._engine = weakref.ref(model), ranks, engine
        self._all: dict[torch.Tensor, bool] = {}  # True if all ranks are known to have begun with the same values
        self.travelling: dict[torch.Tensor, None] = {}  # as all ranks agreed last

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._all)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._all

    def add(self, parameter: torch.Tensor, is_agreed: bool) -> None:
        """Adds one. If all ranks are known to have it, with the same values, its gradient may travel at once."""
        self._all[parameter] = is_agreed
        if is_agreed and parameter.requires_grad:
            self.travelling[parameter] = None

    def agree(self) -> bool:
        """Lets other parameters travel, if others train since the last agreement. Returns whether. Then collective.

        Raises:
            ValueError: on all ranks, if ranks train different ones, or some that were added have other values.
            RuntimeError: ranks alone are here; from the watch.
        """
        now = [p for p in self._all if p.requires_grad or p.grad is not None]  # the optimizer reads all gradients
        if len(now) == len(self.travelling) and all(map(self.travelling.__contains__, now)):
            return False
        with (
            blocking_message(self._engine, "the agreement on which parameters of AdamW train", self._ranks),
            agreement(self._ranks, "a backward, or a step", "the same parameters of AdamW that train") as facts,
        ):
            facts += self._described(now)
        self._all = dict.fromkeys(self._all, True)
        self.travelling = dict.fromkeys(now)
        return True

    def name_of(self, parameter: torch.Tensor) -> str:
        """Returns its name in the model, for messages."""
        return next(self._names([parameter]))

    def _names(self, parameters: Iterable[torch.Tensor]) -> Iterator[str]:
        model = self._model()
        named = model.named_parameters() if model is not None else ()
        names: dict[torch.Tensor, str] = {parameter: f"'{clean_name(name)}'" for name, parameter in named}
        return (names.get(parameter, "a parameter that the model does not have") for parameter in parameters)

    def _described(self, parameters: Sequence[torch.Tensor]) -> Iterator[str]:
        for name, parameter in zip(self._names(parameters), parameters, strict=True):
            line = f"{name} of shape {tuple(parameter.shape)}"
            if not self._all[parameter] and not isinstance(parameter, DTensor):  # whose ranks may have other slices
                line += f", whose values have the checksum {int(checksum(parameter)):016x}"
            yield line
