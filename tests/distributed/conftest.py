import os
import sys
import tempfile
import zlib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import RankPool

# Measured costs are kept for the session, not for the user.
_cache = tempfile.TemporaryDirectory(prefix="dmuon-cache-")
os.environ["DMUON_CACHE_DIR"] = _cache.name


@pytest.fixture(scope="session")
def pool():
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture
def ranks(pool, request):
    """The pool. What a case leaves open of the schedule differs from test to test, the same in every run."""
    seed = zlib.crc32(request.node.nodeid.encode())
    pool.defaults = {
        "costs": "modelled",  # measuring takes a second a model; test_plan does
        "lookahead": seed % 10,
        "node_copy": seed // 10 % 2 == 0,
        "reshard_after_forward": seed // 20 % 4 != 0,
    }
    return pool
