"""The parameters of AdamW that neither dmuon nor fully_shard manages: which of their gradients travel."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from dmuon import _C
from dmuon._running.blocking import blocking_message
from dmuon._setup.agreement import agreement
from dmuon._setup.checksum import checksum
from dmuon._setup.place import clean_name
from dmuon._setup.ranks import Ranks


class PlainParameters:
    """The plain parameters of AdamW's groups, in one order on all ranks. The gradients of those that train travel.

    Iterating goes through all of them that live. If ranks freeze different parameters, or take different ones out of
    groups and model, those that train on any rank go on travelling, and missing gradients count as zeros.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, engine: _C.Engine, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._ranks, self._engine, self._optimizer = weakref.ref(model), ranks, engine, optimizer
        self._all: dict[torch.Tensor, bool] = {}  # True if all ranks are known to have begun with the same values
        # Neither a group nor the model has these any more. Weak, so that they may be freed.
        self._left: MutableMapping[torch.Tensor, None] = WeakTensorKeyDictionary()
        self.travelling: dict[torch.Tensor, None] = {}  # as all ranks agreed last

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.chain(self._all, self._left)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._all or parameter in self._left

    def add(self, parameter: torch.Tensor, is_agreed: bool) -> None:
        """Adds a parameter. Its gradient may travel at once if all ranks are known to have it with the same values."""
        self._all[parameter] = is_agreed
        if is_agreed and parameter.requires_grad:
            self.travelling[parameter] = None

    def agree(self) -> bool:
        """Lets parameters travel that have begun to train. Collective if there are any.

        Returns:
            True if there are any.

        Raises:
            ValueError: on all ranks, if other parameters train on another rank, or some have begun with other values.
            RuntimeError: not all ranks are here; from the watch.
        """
        if left := list(self._left):
            trained = self.trained(left)
            for parameter in left:
                if parameter in trained or parameter.grad is not None:
                    del self._left[parameter]
                    self._all[parameter] = False  # other values may have come since
        # AdamW reads the gradients of frozen parameters too.
        now = [p for p in self._all if p in self.travelling or p.requires_grad or p.grad is not None]
        if len(now) == len(self.travelling):
            return False
        with (
            blocking_message(self._engine, "the agreement on which parameters of AdamW train"),
            agreement(self._ranks, "a backward, or a step", "the same parameters of AdamW that train") as facts,
        ):
            facts += self._described(now)
        self.travelling = dict.fromkeys(now)
        self._all.update(dict.fromkeys(now, True))
        return True

    def trained(self, parameters: Iterable[torch.Tensor]) -> set[torch.Tensor]:
        """Returns those that require a gradient, and that a group or the model still has."""
        found = {parameter for parameter in parameters if parameter.requires_grad}
        left = found.difference(*(group["params"] for group in self._optimizer.param_groups)) if found else found
        if left and (model := self._model()) is not None:
            left.difference_update(*(module._parameters.values() for module in model.modules()))
        return found - left

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """Lets gradients travel no more of parameters that no rank trains or has a gradient of."""
        for parameter in parameters:
            self.travelling.pop(parameter, None)
            if parameter.requires_grad:  # so neither a group nor the model has it
                del self._all[parameter]
                self._left[parameter] = None

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
            if parameter.is_complex():
                raise ValueError(f"dmuon: {name}: expected a real dtype, got {parameter.dtype}")
            line = f"{name} of shape {tuple(parameter.shape)}"
            if not self._all[parameter] and not isinstance(parameter, DTensor):  # whose ranks may have other slices
                line += f", whose values have the checksum {int(checksum(parameter)):016x}"
            yield line
