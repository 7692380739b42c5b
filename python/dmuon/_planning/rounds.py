"""Which of several candidates is the fastest, from rounds in which each was timed."""

from __future__ import annotations

import statistics

_FASTER = 0.97  # the most of the default's time that a candidate may take, in three of four rounds


def winner(rounds: list[dict[int, float]]) -> tuple[int, float]:
    """Returns the index of the fastest candidate and its ratio to the default, 0. Noise counts as no gain."""
    best, least = 0, 1.0
    for at in rounds[0].keys() - {0}:
        ratios = sorted(one[at] / one[0] for one in rounds)
        if ratios[3 * len(ratios) // 4] <= _FASTER and (middle := statistics.median(ratios)) < least:
            best, least = at, middle
    return best, least
