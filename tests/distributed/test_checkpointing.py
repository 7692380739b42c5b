"""Weights equal a single process where forwards are recomputed or compiled."""

from __future__ import annotations

import checkpointing_cases as cases
import pytest
from scenario import check


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("group", [1, 2])
def test_recomputed_blocks(ranks, reentrant, group):
    check(ranks, cases.outside, options={"use_reentrant": reentrant}, group=group)


def test_recomputation_that_runs_to_its_end(ranks):
    check(ranks, cases.outside, options={"use_reentrant": False}, early_stop=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_inside_a_block(ranks, reentrant):
    check(ranks, cases.inside, options={"use_reentrant": reentrant})


def test_checkpoint_wrapper(ranks):
    check(ranks, cases.wrapped)


@pytest.mark.xdist_group("compiles")  # what a first compilation prepares is there for the second
@pytest.mark.parametrize("whole_model", [False, True])
def test_compiled(ranks, whole_model):
    check(ranks, cases.compiled, (2,) if whole_model else (2, 2), whole_model=whole_model)
