"""How ranks agree while a model is set up: what one rank finds wrong all raise, and what must be equal is compared.

All that is exchanged here are a few words over the host, as many on a thousand ranks as on two; what one rank alone
has to say (an error, a plan) it broadcasts. What a training step agrees on is engine/agreement.h's.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from dmuon._setup.groups import verdict_group
from dmuon._setup.ranks import Ranks

T = TypeVar("T")


@contextlib.contextmanager
def agreement(
    ranks: Ranks, function: str, expected: str = "the same model and options on every rank"
) -> Iterator[list[str]]:
    """Every rank leaves the block well, or every rank raises ValueError. Collective, at the end of the block.

    The block gets a list and adds facts to it, one line each, which must be equal on every rank. Nothing in the block
    may wait for another rank: one that has raised goes straight to the end. A rank raises its own error if it has one,
    and otherwise the first of the others' with that rank's number. An error that is no ValueError becomes the cause of
    one.

        with agreement(ranks, "Muon") as facts:
            check(options)
            facts.append(f"options {options}")

    Args:
        ranks: the mesh.
        function: for messages.
        expected: for the message where facts differ.
    """
    facts: list[str] = []
    error: Exception | None = None
    try:
        yield facts
    except Exception as raised:  # whatever it is, the other ranks must hear of it
        error = raised
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    words = [word for (word,) in struct.iter_unpack("<I", digest)]
    extremes = largest_unless(ranks, error, [*words, *(-word for word in words)])
    if any(most != -minus_least for most, minus_least in zip(extremes[:8], extremes[8:], strict=True)):
        _raise_difference(ranks, function, expected, facts)


def largest_unless(ranks: Ranks, error: Exception | None, numbers: Sequence[float]) -> list[float]:
    """`largest`, unless any rank brings an error: then all raise, as `agreement` says. Collective."""
    minus_first, *found = largest(ranks, [-ranks.size if error is None else -ranks.slot, *numbers])
    first = -int(minus_first)
    if first == ranks.size:
        return found
    theirs = from_slot(ranks, first, None if error is None else described(error))
    if error is None:
        raise ValueError(f"{theirs} (on rank {ranks.everyone[first]})")
    if isinstance(error, ValueError):
        raise error
    raise ValueError(described(error)) from error


def _raise_difference(ranks: Ranks, function: str, wanted: str, facts: list[str]) -> NoReturn:
    pairs = itertools.zip_longest(from_slot(ranks, 0, facts), facts, fillvalue="nothing")
    difference = next(((first, own) for first, own in pairs if first != own), None)
    (minus_slot,) = largest(ranks, [-ranks.size if difference is None else -ranks.slot])
    slot = -int(minus_slot)
    expected, got = from_slot(ranks, slot, difference)  # type: ignore[misc]  # that slot has one
    raise ValueError(
        f"{function}: ranks differ. Expected: {wanted}. "
        f"Rank {ranks.everyone[0]} has: {expected}; rank {ranks.everyone[slot]} has: {got}"
    )


def from_first(ranks: Ranks, make: Callable[[], T]) -> T:
    """What `make` returns at slot 0. Collective; if it raises there, every rank raises ValueError."""
    answer: tuple[T | None, str | None] = (None, None)
    cause: Exception | None = None
    if ranks.slot == 0:
        try:
            answer = (make(), None)
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            answer, cause = (None, described(error)), error
    value, problem = from_slot(ranks, 0, answer)
    if problem is not None:
        raise ValueError(problem) from cause
    return value  # type: ignore[return-value]


def from_slot(ranks: Ranks, slot: int, value: T) -> T:
    """The value of one rank. Collective; a rank holds no more than its own and that one."""
    group = verdict_group(ranks)
    if group is None:
        return value
    held: list[Any] = [value if ranks.slot == slot else None]
    dist.broadcast_object_list(held, src=ranks.everyone[slot], group=group)
    return cast("T", held[0])


def largest(ranks: Ranks, numbers: Sequence[float]) -> list[float]:
    """The largest of each number over all ranks, in fp64, which has integers up to 2^53. Collective."""
    words = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    group = verdict_group(ranks)
    if group is not None:
        dist.all_reduce(words, dist.ReduceOp.MAX, group=group)
    found: list[float] = words.tolist()
    return found


def all_gather(ranks: Ranks, value: T) -> list[T]:
    """The value of every rank, by slot. Collective, and the one call here that takes memory for all ranks' values."""
    group = verdict_group(ranks)
    if group is None:
        return [value]
    values: list[Any] = [None] * ranks.size
    dist.all_gather_object(values, value, group=group)
    return values


def described(error: Exception) -> str:
    """The message of an error for all ranks; a ValueError, which is ours, says everything itself."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
