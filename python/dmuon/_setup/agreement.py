"""How ranks agree while a model is set up: what one rank finds wrong all raise, and what must be equal is compared.

All that is exchanged here are a few words over the host; what a training step agrees on is engine/agreement.h's.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from dmuon._setup.groups import verdict_group
from dmuon._setup.ranks import Ranks

T = TypeVar("T")


@contextlib.contextmanager
def agreement(ranks: Ranks, function: str) -> Iterator[list[str]]:
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
    """
    facts: list[str] = []
    error: Exception | None = None
    try:
        yield facts
    except Exception as raised:  # whatever it is, the other ranks must hear of it
        error = raised
    problem = None if error is None else described(error)
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    answers = all_gather(ranks, (problem, digest))
    if isinstance(error, ValueError):
        raise error
    if error is not None:
        raise ValueError(problem) from error
    for slot, (other, _) in enumerate(answers):
        if other is not None:
            raise ValueError(f"{other} (on rank {ranks.everyone[slot]})")
    if any(theirs != digest for _, theirs in answers):
        _raise_difference(ranks, function, facts)


def _raise_difference(ranks: Ranks, function: str, facts: list[str]) -> None:
    lines = all_gather(ranks, facts)
    for slot, theirs in enumerate(lines):
        for first, other in itertools.zip_longest(lines[0], theirs, fillvalue="nothing"):
            if first != other:
                raise ValueError(
                    f"{function}: ranks differ. Expected: the same model and options on every rank. "
                    f"Rank {ranks.everyone[0]} has: {first}; rank {ranks.everyone[slot]} has: {other}"
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
    value, problem = all_gather(ranks, answer)[0]
    if problem is not None:
        raise ValueError(problem) from cause
    return value  # type: ignore[return-value]


def all_gather(ranks: Ranks, value: T) -> list[T]:
    """The value of every rank, by slot. Collective."""
    group = verdict_group(ranks)
    if group is None:
        return [value]
    values: list[Any] = [None] * ranks.size
    dist.all_gather_object(values, value, group=group)
    return values


def described(error: Exception) -> str:
    """The message of an error for all ranks; a ValueError, which is ours, says everything itself."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
