"""Fair comparison on a noisy machine: interleaved blocks, paired ratios, distribution-free intervals.

Contenders run in turns, in a fresh random order every round, so that whatever else the machine does
hits all alike. Each round gives a ratio. The median over the rounds is reported with the
order-statistic interval of the median, which assumes no distribution.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios and an interval that holds the true median with >= 95 %."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def orders(names: Sequence[str], num_rounds: int, seed: int = 0) -> Iterator[list[str]]:
    """For every round the names in random order: one stream, so every rank draws the same orders."""
    stream = random.Random(seed)
    for _ in range(num_rounds):
        order = list(names)
        stream.shuffle(order)
        yield order


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The narrowest symmetric pair of order statistics around the median with this coverage.

    The number of values below the true median is Binomial(n, 1/2). With too few values for the
    confidence (fewer than 6 for 95 %) the whole range is returned.
    """
    ordered, n = sorted(values), len(values)
    tail, rank = 0.0, 0
    while rank < n // 2:
        tail += math.comb(n, rank) / 2**n
        if 2 * tail > 1 - confidence:
            break
        rank += 1
    first = max(rank - 1, 0)
    return ordered[first], ordered[n - 1 - first]


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """values[i] / base[i], both measured in round i, summarised over the rounds."""
    ratios = [value / other for value, other in zip(values, base, strict=True)]
    return Ratio(statistics.median(ratios), *median_interval(ratios))
