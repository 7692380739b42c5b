import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))  # the pool
sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks


@pytest.fixture(scope="session")
def make_ranks():
    """Pools of processes by their size, each started once; one that failed is replaced."""
    pools: dict[int, Ranks] = {}

    def make(size: int) -> Ranks:
        if size not in pools or not pools[size]._workers:
            pools[size] = Ranks(size)
        return pools[size]

    yield make
    for pool in pools.values():
        pool.close()


@pytest.fixture
def device():
    """The module, with nothing queued, counted or set."""
    import async_device

    async_device.reset()
    yield async_device
    async_device.reset()
