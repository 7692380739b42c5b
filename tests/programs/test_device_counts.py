"""What a step asks of an accelerator, counted on the asynchronous device (bench/device_counts.py prints it)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from device_counts import KINDS, MATRICES, PHASES, count, iteration, total

pytestmark = pytest.mark.xdist_group("async_device")
NUM_BLOCKS = 4


@pytest.fixture(scope="module")
def counts(device_ranks):
    return {kind: device_ranks.run(count, (2, 2), kind=kind, num_blocks=NUM_BLOCKS)[0] for kind in KINDS}


def beyond(counts, phase, what, kind="rest"):
    """What a step does that it does not without dmuon's matrices; or than another kind."""
    return total(counts["dmuon"][phase], what) - total(counts[kind][phase], what)


def test_kernels_a_matrix(counts):
    assert 0 < beyond(counts, "forward", "kernels") <= MATRICES * NUM_BLOCKS
    assert 0 < beyond(counts, "backward", "kernels") <= 4 * MATRICES * NUM_BLOCKS
    assert beyond(counts, "forward", "kernels", "adamw") <= 0
    # Those of norms, and one that makes NaN infinity, of which a maximum is sure. No gradient is multiplied there.
    assert 0 < beyond(counts, "clip", "kernels") <= 16


def test_one_launch_of_messages_a_unit_stage_and_direction(counts):
    """In a forward each block's weights come from its node; in a backward again, and gradients leave in two stages."""
    launches = {phase: beyond(counts, phase, "communication_launches") for phase in PHASES}
    assert 0 < launches["forward"] + launches["step"] <= 2 * (NUM_BLOCKS + 1)  # two stages
    assert 0 < launches["backward"] <= 3 * (NUM_BLOCKS + 1)
    assert launches["clip"] <= 1  # the norms cross the row and the column


def test_the_host_never_waits_for_the_device(counts):
    assert [total(counts["dmuon"][phase], "host_syncs") for phase in PHASES] == [0, 0, 0, 0]


def test_updates_run_on_the_stream_of_low_priority(counts):
    """The default stream computes; those of high priority carry messages, and pack what they carry."""
    kernels = {kind: counts[kind]["step"]["kernels_by_stream"] for kind in ("dmuon", "rest")}
    assert kernels["rest"].keys() == {"default"}
    assert kernels["dmuon"]["low"] > 2 * (kernels["dmuon"]["default"] + kernels["dmuon"]["high"])
    assert kernels["dmuon"]["default"] <= kernels["rest"]["default"] + 10


def test_newton_schulz_launches_few_kernels_a_batch(device_ranks):
    (found,) = device_ranks.run(iteration, (1,))
    assert len(found) == 3
    assert all(0 < kernels <= 40 for kernels in found.values()), found
