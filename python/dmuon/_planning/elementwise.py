"""Finds who moves momenta and weights fastest on a device: PyTorch's operators, or kernels of dmuon."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dmuon import _C
from dmuon._planning.choices import Setting
from dmuon._planning.clock import device_ns
from dmuon._planning.rounds import in_turns, winner
from dmuon._setup.hyperparameters import choice_of, plain_choice

_TIMES = 3  # updates of a block

# Backends with one iteration: they differ in who moves the weights after it.
FULL, FUSED = "cuda_full", "cuda_fused"


def fastest_elementwise(choice: _C.Choice, gradients: Tensor, setting: Setting, may_go_on: Callable[[], bool]) -> str:
    """Times updates by these gradients, without the iteration between their two halves.

    Gradients are [updates, number, rows, cols], fp32. There are at least seven rounds, then more while one `may_go_on`.

    Returns:
        A name of `_C.elementwise`; "" if the default stays, because no other is exact and faster.
    """
    names = ["", *_C.elementwise(setting.device, setting.ns_dtype)[1:]]
    if len(names) == 1:
        return ""
    sides = [_Update(choice, name, gradients, setting) for name in names]
    timed = [0, *(at for at in range(1, len(sides)) if sides[at].is_near(sides[0]))]
    if timed == [0]:
        return ""
    rounds = in_turns(timed, lambda at: sides[at].seconds(), may_go_on)
    return names[winner(rounds)[0]]


def fastest_last_product(
    choice: _C.Choice, gradients: Tensor, setting: Setting, may_go_on: Callable[[], bool]
) -> _C.Choice:
    """Returns the choice, or its twin whose last product moves the weights, if updates of one step are faster by it.

    See `fastest_elementwise` for the other arguments. Only FULL has a twin.
    """
    if choice.backend != FULL:
        return choice
    both = [choice, choice_of(FUSED, *plain_choice(choice)[1:])]
    sides = [_Update(one, choice.elementwise, gradients, setting, steps=1) for one in both]
    if not sides[1].is_near(sides[0]):
        return choice
    rounds = in_turns([0, 1], lambda at: sides[at].seconds(), may_go_on)
    return both[winner(rounds)[0]]


class _Update:
    """Updates of one batch of weights by many gradients, with the last `steps` steps of the iteration."""

    def __init__(self, choice: _C.Choice, name: str, gradients: Tensor, setting: Setting, steps: int = 0) -> None:
        backend, _, batched, panel_rows, _ = plain_choice(choice)
        self.backend, self.name, self._gradients, self._setting = backend, name, gradients, setting
        self._group = _C.MuonGroup(
            lr=1e-3,
            weight_decay=0.1,
            momentum=0.95,
            nesterov=True,
            coefficients=setting.coefficients[len(setting.coefficients) - steps :],
            eps=_C.EPS,
            adjust_lr_fn="original",
            ns_dtype=setting.ns_dtype,
            choices={
                (gradients.shape[-2], gradients.shape[-1]): choice_of(backend, "DIRECT", batched, panel_rows, name)
            },
        )
        self._weights, self._momentum = gradients[-1].clone(), gradients[-1].mul(0.1)
        words = _C.memo_words(setting.device)
        self._memo = gradients.new_zeros(len(self._weights), 1, words) if words else None
        self._applies = torch.ones((), dtype=torch.bool, device=setting.device)
        for index in range(_TIMES):  # the first step guesses scales
            self._run(index)
        self._moved = self._weights - gradients[-1]

    def _run(self, index: int) -> None:
        gradient = self._gradients[index % len(self._gradients)]
        _C.muon_update(self._weights, self._momentum, gradient, self._group, self._applies, memo=self._memo)

    def is_near(self, other: _Update) -> bool:
        """True if the first updates moved weights and momentum as the other's did, but for rounding."""
        unit = torch.finfo(self._setting.ns_dtype).eps
        of_momentum = (self._momentum - other._momentum).norm() <= 1e-6 * other._momentum.norm()
        return bool(of_momentum & ((self._moved - other._moved).norm() <= unit * other._moved.norm()))

    def seconds(self) -> float:
        """Returns the seconds of a block of updates."""

        def updates() -> None:
            for index in range(_TIMES):
                self._run(index)

        return device_ns(updates, self._setting.device) / 1e9
