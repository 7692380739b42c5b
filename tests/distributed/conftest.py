import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import RankPool


@pytest.fixture(scope="session")
def ranks():
    pool = RankPool(4)
    yield pool
    pool.close()
