"""The parameters of AdamW that neither dmuon nor fully_shard manages: which of their gradients travel."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, MutableMapping, Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from dmuon import _C
from dmuon._running.blocking import blocking_message
from dmuon._setup.agreement import agreement
from dmuon._setup.checksum import checksum
from dmuon._setup.members import is_swapped
from dmuon._setup.place import clean_name
from dmuon._setup.ranks import Ranks

_IS_MEAN = "_dmuon_is_mean"  # a mark on a gradient


def is_mean(gradient: torch.Tensor | None) -> bool:
    """True if the gradient has become a mean over the slots, and nothing has come to it since."""
    return gradient is not None and _IS_MEAN in vars(gradient)


def mark(gradient: torch.Tensor, is_mean: bool) -> None:
    """Notes whether a gradient is a mean. Another tensor in its place has no mark."""
    if is_mean:
        setattr(gradient, _IS_MEAN, True)
    else:
        vars(gradient).pop(_IS_MEAN, None)


class PlainParameters:
    """The plain parameters that AdamW's groups have had, as far as they live. The gradients of those that train travel.

    If ranks freeze different parameters, or take different ones out of groups and model, those that train on any rank
    go on travelling, and missing gradients count as zeros.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, engine: _C.Engine, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._ranks, self._engine, self._optimizer = model, ranks, engine, optimizer
        self._num_added = 0
        # Parameters, each with its number, which gives all ranks one order.
        self.travelling: dict[torch.Tensor, int] = {}  # as all ranks agreed last
        self._idle: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()  # so that they may be freed
        self._idle_swapped: dict[torch.Tensor, int] = {}  # may have no weak references, see is_swapped

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.chain(self.travelling, self._idle, self._idle_swapped)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return any(parameter in some for some in (self.travelling, self._idle, self._idle_swapped))

    def add(self, parameter: torch.Tensor, is_agreed: bool) -> None:
        """Adds a parameter. Its gradient may travel at once if all ranks are known to have it with the same values."""
        travels = is_agreed and parameter.requires_grad
        if travels:
            self.travelling[parameter] = self._num_added
        else:
            self._let_idle(parameter, self._num_added)
        self._num_added += 1

    def _let_idle(self, parameter: torch.Tensor, number: int) -> None:
        idle = self._idle_swapped if is_swapped(parameter) else self._idle
        idle[parameter] = number

    def agree(self) -> bool:
        """Lets parameters travel that have begun to train. Collective if there are any.

        Returns:
            True if there are any.

        Raises:
            ValueError: on all ranks, if other parameters train on another rank, or some have begun with other values.
            RuntimeError: not all ranks are here; from the watch.
        """
        idle = {**self._idle, **self._idle_swapped}
        # AdamW reads the gradients of frozen parameters too.
        came = {parameter for parameter in idle if parameter.grad is not None}
        begins = self.trained(idle) | (came - self.left_with_mean(came))
        begun = [parameter for parameter in idle if parameter in begins]
        if not begun:
            return False
        numbers = self.travelling | {parameter: idle[parameter] for parameter in begun}
        now = sorted(numbers, key=numbers.__getitem__)
        with (
            blocking_message(self._engine, "the agreement on which parameters of AdamW train"),
            agreement(self._ranks, "a backward, or a step", "the same parameters of AdamW that train") as facts,
        ):
            facts += self._described(now)
        self.travelling = {parameter: numbers[parameter] for parameter in now}
        for parameter in begun:
            self._idle.pop(parameter, None)
            self._idle_swapped.pop(parameter, None)
        return True

    def trained(self, parameters: Iterable[torch.Tensor]) -> set[torch.Tensor]:
        """Returns those that require a gradient, and that a group or the model still has."""
        found = {parameter for parameter in parameters if parameter.requires_grad}
        return found - self._left(found)

    def left_with_mean(self, parameters: Iterable[torch.Tensor]) -> set[torch.Tensor]:
        """Returns those whose gradient is a mean of before, and that neither a group nor the model has any more."""
        return self._left({parameter for parameter in parameters if is_mean(parameter.grad)})

    def _left(self, parameters: set[torch.Tensor]) -> set[torch.Tensor]:
        if not parameters:
            return set()
        left = parameters.difference(*(group["params"] for group in self._optimizer.param_groups))
        if left:
            left.difference_update(*(module._parameters.values() for module in self._model.modules()))
        return left

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """Lets gradients travel no more of parameters that no rank trains or has a gradient of."""
        for parameter in parameters:
            self._let_idle(parameter, self.travelling.pop(parameter))

    def name_of(self, parameter: torch.Tensor) -> str:
        """Returns its name in the model, for messages."""
        return next(self._names([parameter]))

    def _names(self, parameters: Iterable[torch.Tensor]) -> Iterator[str]:
        named = self._model.named_parameters()
        names: dict[torch.Tensor, str] = {parameter: f"'{clean_name(name)}'" for name, parameter in named}
        return (names.get(parameter, "a parameter that the model does not have") for parameter in parameters)

    def _described(self, parameters: Sequence[torch.Tensor]) -> Iterator[str]:
        for name, parameter in zip(self._names(parameters), parameters, strict=True):
            if parameter.is_complex():
                raise ValueError(f"dmuon: {name}: expected a real dtype, got {parameter.dtype}")
            line = f"{name} of shape {tuple(parameter.shape)}"
            # Ranks may have changed idle parameters apart. Of a DTensor they may have different slices.
            if parameter not in self.travelling and not isinstance(parameter, DTensor):
                line += f", whose values have the checksum {int(checksum(parameter)):016x}"
            yield line
