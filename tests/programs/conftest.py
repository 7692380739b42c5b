import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))  # the pool and the reference optimizer
sys.path.insert(0, str(Path(__file__).parent))

from judge import ANSWER_S
from pool import RankPool


@pytest.fixture(scope="session")
def programs_pool():
    pool = RankPool(4, 10 * ANSWER_S)  # a limit for hangs
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def device_ranks():
    """On the asynchronous device; the tests that use it are of one xdist_group, and so of one process."""
    pool = RankPool(4, device_type="emulated")
    yield pool
    pool.close()
