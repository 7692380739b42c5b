"""Rounds in which each of several candidates is timed, and which of them is the fastest."""

from __future__ import annotations

import statistics
from collections.abc import Callable

LEAST_ROUNDS = 7
_ROUNDS = 15
_FASTER = 0.97  # the most of the default's time that a candidate may take, in three of four rounds


def in_turns(
    candidates: list[int], seconds: Callable[[int], float], may_go_on: Callable[[], bool]
) -> list[dict[int, float]]:
    """Times all candidates in each round, of which another begins the next. Ends after seven if none `may_go_on`."""
    rounds: list[dict[int, float]] = []
    while len(rounds) < _ROUNDS and (len(rounds) < LEAST_ROUNDS or may_go_on()):
        turn = len(rounds) % len(candidates)
        rounds.append({at: seconds(at) for at in candidates[turn:] + candidates[:turn]})
    return rounds


def winner(rounds: list[dict[int, float]]) -> tuple[int, float]:
    """Returns the index of the fastest candidate and its ratio to the default, 0. Noise counts as no gain."""
    best, least = 0, 1.0
    for at in rounds[0].keys() - {0}:
        ratios = sorted(one[at] / one[0] for one in rounds)
        if ratios[3 * len(ratios) // 4] <= _FASTER and (middle := statistics.median(ratios)) < least:
            best, least = at, middle
    return best, least
