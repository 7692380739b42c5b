"""One rank fails while Muon makes the first values: Muon raises on every rank, at once, and processes go on."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from default_device import own_random_numbers
from dmuon._running import first_values
from dmuon._running.adamw import InnerAdamW
from models import make_gpt
from refusals import attempt, rank_of
from test_meta_start import all_kinds_of_init
from training import AHEAD, dedicate

import dmuon
from dmuon import _C

PROBLEM = "no memory left"
# Peers that waited for the rank would wait so long.
TIMEOUT = datetime.timedelta(seconds=60)
AT_ONCE_S = 40


def fail_from_first_values(owner: Any, name: str, after: int) -> Any:
    """Makes calls of `owner.name` by first_values.py raise, except the first `after` calls."""
    right, calls = getattr(owner, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename == first_values.__file__:
            calls.append(name)
            if len(calls) > after:
                raise RuntimeError(PROBLEM)
        return right(*args, **kwargs)

    return mock.patch.object(owner, name, failing)


@own_random_numbers()
def first_values_that_fail(mesh: Any, owner: Any, name: str, after: int, on: int, syncs: bool, on_meta: bool) -> None:
    with torch.device("meta") if on_meta else torch.device(mesh.device_type):
        model = make_gpt(depth=2)
    dedicate(model, mesh, AHEAD, sync_from_rank0=syncs, timeout=TIMEOUT)
    if on_meta:
        model.to_empty(device=mesh.device_type)
        all_kinds_of_init(model)
    with raises_at_once(), fail_from_first_values(owner, name, after) if rank_of(mesh) == on else nullcontext():
        dmuon.Muon(model)


@contextmanager
def raises_at_once() -> Iterator[None]:
    begin = time.monotonic()
    try:
        yield
    finally:
        spent = time.monotonic() - begin
        assert spent < AT_ONCE_S, f"{spent:.0f} s"


@pytest.mark.parametrize(
    ("owner", "name", "after", "syncs", "on_meta", "on"),
    [
        *((_C.Transfers, "scatter", 2, False, False, on) for on in (0, 1)),  # a copy on this rank, without a message
        *((_C.Transfers, "owned_parts", 1, True, False, on) for on in (0, 1)),  # at the sender, and at an owner
        *((torch.Tensor, "copy_", 0, True, False, on) for on in (0, 1)),  # after a message
        (torch.Tensor, "reshape", 2, True, False, 0),  # before a message
        *((_C.Transfers, "owned_parts", 0, False, True, on) for on in (0, 1)),  # values that one rank has initialised
    ],
)
def test_all_ranks_raise_what_one_found_and_train_another_model(ranks, owner, name, after, syncs, on_meta, on):
    options = {"owner": owner, "name": name, "after": after, "on": on, "syncs": syncs, "on_meta": on_meta}
    messages = ranks.run(attempt, (2, 2), program=first_values_that_fail, options=options)
    assert_all_name_the_problem(messages, on)


def assert_all_name_the_problem(messages: list[str], on: int) -> None:
    assert messages[on] == f"RuntimeError: {PROBLEM}"
    assert {message for rank, message in enumerate(messages) if rank != on} == {
        f"RuntimeError: {PROBLEM} (on rank {on})"
    }


@own_random_numbers()
def state_of_adamw_that_fails(mesh: Any, on: int) -> None:
    model = make_gpt(depth=2)
    dedicate(model, mesh, AHEAD, timeout=TIMEOUT)
    lacks_memory = mock.patch.object(InnerAdamW, "make_state", side_effect=RuntimeError(PROBLEM))
    with raises_at_once(), lacks_memory if rank_of(mesh) == on else nullcontext():
        dmuon.Muon(model)


def test_all_ranks_raise_if_one_lacks_memory_for_the_state_of_adamw(ranks):
    messages = ranks.run(attempt, (2, 2), program=state_of_adamw_that_fails, options={"on": 1})
    assert_all_name_the_problem(messages, on=1)
