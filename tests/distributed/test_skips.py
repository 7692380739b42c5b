"""Ranks that do unlike things after the first step: they skip units, or run no backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from models import Skips, make_gpt, square_loss
from scenario import Session, assert_equal_to_reference, check, language_loss, run_scenario
from training import AHEAD, FAR_AHEAD, KEPT, KEPT_NO_COPY, NO_COPY, ON_DEMAND

# By step and rank: the units that the rank skips.
SKIPS = {
    "one rank, one unit": {1: {1: (2,)}},
    "one rank, all units": {1: {1: (0, 1, 2, 3)}, 3: {0: (0, 1, 2, 3)}},
    "every rank another": {1: {r: (r,) for r in range(4)}, 2: {r: (3 - r,) for r in range(4)}},
    "all ranks": {1: {r: (1, 3) for r in range(4)}},
    "last and first": {1: {2: (3,)}, 2: {2: (0,)}},
}


def skipped_units(s: Session, skips: dict[int, dict[int, tuple[int, ...]]]) -> None:
    torch.manual_seed(0)
    s.start(Skips(), units=lambda m: [])
    for step in range(5):
        s.backward(square_loss(step, skips.get(step, {})))
        s.step()


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
@pytest.mark.parametrize(
    ("name", "schedule"), list(zip(SKIPS, [AHEAD, ON_DEMAND, NO_COPY, FAR_AHEAD, KEPT_NO_COPY], strict=True))
)
def test_ranks_may_skip_units_after_the_first_step(ranks, mesh, name, schedule):
    check(ranks, skipped_units, mesh, schedule=schedule, skips=SKIPS[name])


def test_the_reference_sees_skips():
    """A check of the check: skipping changes the weights by more than the bound."""
    initial, plain, _ = run_scenario(None, skipped_units, AHEAD, 4, skips={})
    _, skipped, _ = run_scenario(None, skipped_units, AHEAD, 4, skips=SKIPS["one rank, one unit"])
    with pytest.raises(AssertionError):
        assert_equal_to_reference(initial, plain, skipped)


def a_rank_without_a_backward(s: Session) -> None:
    """In the third step rank 1 computes a loss and drops it."""
    s.start(make_gpt(depth=2), units=None)
    for step in range(4):
        whole = language_loss(step, s.size)

        def loss(model: nn.Module, rank: int, step: int = step, whole=whole) -> torch.Tensor | None:
            value = whole(model, rank)
            return None if (step, rank) == (2, 1) else value

        s.backward(loss)
        s.step()


def test_a_rank_without_a_backward_counts_as_zeros_and_hangs_nobody(ranks):
    check(ranks, a_rank_without_a_backward, schedule=AHEAD)


def two_models_of_which_a_rank_skips_a_unit(s: Session) -> None:
    """Both forwards run before either backward, and rank 1 skips the last unit of the first model."""
    first, second = s.another(), s.another()
    torch.manual_seed(0)
    first.start(Skips(), units=lambda model: [])
    second.start(Skips(), units=lambda model: [])
    for step in range(3):
        losses = square_loss(step, {1: (3,)} if step == 1 else {}), square_loss(step)
        pairs = [(losses[0](first.model, rank), losses[1](second.model, rank)) for rank in first.each_rank()]
        for values in zip(*pairs, strict=True):  # all of one model, then all of the other
            for value in values:
                (value / (s.size if s.reference else 1)).backward()
        first.step()
        second.step()
    s.initial, s.model = second.initial, second.model
    s.notes.append((first.initial, first.weights()))


def test_a_unit_skipped_in_one_model_does_not_disturb_another(ranks):
    *notes, ((initial, expected),) = check(ranks, two_models_of_which_a_rank_skips_a_unit, schedule=KEPT)
    for ((_, got),) in notes:
        assert_equal_to_reference(initial, expected, got)
