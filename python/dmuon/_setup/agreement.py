"""Agreement of ranks while a model is set up: all raise what one finds wrong, and all compare what must be equal.

Ranks exchange a few words over the host, as many on a thousand ranks as on two. A rank broadcasts what it alone
knows, such as an error or a plan. Training steps agree by engine/agreement.h.
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

from dmuon._setup.groups import everyone_group
from dmuon._setup.ranks import Ranks

T = TypeVar("T")

# All ranks must hear of these if one rank raises them.
ENDS = (Exception, KeyboardInterrupt, SystemExit)


@contextlib.contextmanager
def agreement(
    ranks: Ranks, function: str, expected: str = "the same model and options on every rank"
) -> Iterator[list[str]]:
    """Makes every rank raise ValueError at the end of the block if one rank raises in it. Collective, at the end.

    The block adds facts to a list, one line each, which must be equal on every rank. The block must not wait for
    another rank, because a rank that raises goes straight to the end. A rank raises its own error if it has one, else
    the error of the first rank that has one, with that rank's number. Other exceptions become the cause of a
    ValueError; an interrupt or exit stays one.

        with agreement(ranks, "Muon") as facts:
            check(options)
            facts.append(f"options {options}")

    Args:
        ranks: the mesh.
        function: named in messages.
        expected: named in the message if facts differ.
    """
    facts: list[str] = []
    error: BaseException | None = None
    try:
        yield facts
    except ENDS as raised:  # of any kind: the other ranks must raise it too
        error = raised
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    words = [word for (word,) in struct.iter_unpack("<I", digest)]
    extremes = largest_unless(ranks, error, [*words, *(-word for word in words)])
    if any(most != -minus_least for most, minus_least in zip(extremes[:8], extremes[8:], strict=True)):
        _raise_difference(ranks, function, expected, facts)


def largest_unless(ranks: Ranks, error: BaseException | None, numbers: Sequence[float]) -> list[float]:
    """Returns `largest`. If a rank has an error, all ranks raise instead, as `agreement` does. Collective."""
    minus_first, *found = largest(ranks, [-ranks.size if error is None else -ranks.owner, *numbers])
    first = -int(minus_first)
    if first == ranks.size:
        return found
    theirs = from_owner(ranks, first, None if error is None else message_of(error))
    if error is None:
        raise ValueError(f"{theirs} (on rank {ranks.everyone[first]})")
    if isinstance(error, ValueError) or not isinstance(error, Exception):
        raise error
    raise ValueError(message_of(error)) from error


def _raise_difference(ranks: Ranks, function: str, wanted: str, facts: list[str]) -> NoReturn:
    pairs = itertools.zip_longest(from_owner(ranks, 0, facts), facts, fillvalue="nothing")
    difference = next(((first, own) for first, own in pairs if first != own), None)
    (minus_owner,) = largest(ranks, [-ranks.size if difference is None else -ranks.owner])
    owner = -int(minus_owner)
    expected, got = from_owner(ranks, owner, difference)  # type: ignore[misc]  # that rank has one
    raise ValueError(
        f"{function}: ranks differ. Expected: {wanted}. "
        f"Rank {ranks.everyone[0]} has: {expected}; rank {ranks.everyone[owner]} has: {got}"
    )


def from_first(ranks: Ranks, make: Callable[[], T]) -> T:
    """Calls `make` at the first rank. Returns its result, or raises its error as ValueError, everywhere. Collective."""
    answer: tuple[T | None, str | None] = (None, None)
    cause: BaseException | None = None
    if ranks.owner == 0:
        try:
            answer = (make(), None)
        except ENDS as error:  # of any kind: the other ranks wait for the answer
            answer, cause = (None, message_of(error)), error
    value, problem = from_owner(ranks, 0, answer)
    if problem is not None:
        raise ValueError(problem) from cause
    return value  # type: ignore[return-value]


@contextlib.contextmanager
def exchange() -> Iterator[None]:
    """Says of the block's message what its failure means."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"dmuon: an exchange of words failed: a rank died, or did not come. Reported: {error}"
        ) from error


def from_owner(ranks: Ranks, owner: int, value: T) -> T:
    """Returns the value of one rank, by its number in `everyone`. Collective.

    A rank holds at most its own value and that one.
    """
    group = everyone_group(ranks)
    if group is None:
        return value
    held: list[Any] = [value if ranks.owner == owner else None]
    with exchange():
        dist.broadcast_object_list(held, src=ranks.everyone[owner], group=group)
    return cast("T", held[0])


def largest(ranks: Ranks, numbers: Sequence[float]) -> list[float]:
    """Returns the largest of each number over all ranks. Collective. In fp64, exact for integers up to 2^53."""
    words = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    group = everyone_group(ranks)
    if group is not None:
        with exchange():
            dist.all_reduce(words, dist.ReduceOp.MAX, group=group)
    found: list[float] = words.tolist()
    return found


def all_gather(ranks: Ranks, value: T) -> list[T]:
    """Returns the value of every rank, in the order of `everyone`. Collective.

    The only call here that holds all ranks' values.
    """
    group = everyone_group(ranks)
    if group is None:
        return [value]
    values: list[Any] = [None] * ranks.size
    with exchange():
        dist.all_gather_object(values, value, group=group)
    by_rank = dict(zip(sorted(ranks.everyone), values, strict=True))
    return [by_rank[rank] for rank in ranks.everyone]


def message_of(error: BaseException) -> str:
    """Returns the message of an error for all ranks. A ValueError, which is ours, needs no class name."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
