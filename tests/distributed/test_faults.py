"""A rank that is lost takes the others with it: they raise within the timeout."""

from __future__ import annotations

import faults_cases as cases
import pytest
from pool import RankPool


@pytest.fixture
def mortals():
    pool = RankPool(4, timeout_s=cases.TIMEOUT_S)
    yield pool
    pool.close()


@pytest.mark.parametrize("when", ["forward", "backward", "step"])
@pytest.mark.parametrize("fsdp", [True, False])
def test_the_others_raise_when_a_rank_dies(mortals, when, fsdp):
    answers = mortals.run(cases.rank_that_dies, (2, 2), may_die=(cases.VICTIM,), when=when, fsdp=fsdp)
    assert len(answers) == 3
    for kind, message, seconds in answers:
        assert seconds <= cases.TIMEOUT_S + 5, f"{kind} after {seconds:.0f} s: {message}"
        assert kind in ("RuntimeError", "CommError", "DistBackendError"), message


def test_the_others_raise_when_a_rank_hangs(mortals):
    answers = mortals.run(cases.rank_that_hangs, (2, 2), may_die=())
    for rank, (_, message, seconds) in enumerate(answers):
        assert seconds <= cases.TIMEOUT_S + 5
        assert rank == cases.VICTIM or "timeout" in message
