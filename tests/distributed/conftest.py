import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from pool import RankPool

# Measured costs are kept for the session, not for the user.
_cache = tempfile.TemporaryDirectory(prefix="dmuon-cache-")
os.environ["DMUON_CACHE_DIR"] = _cache.name


@pytest.fixture(scope="session")
def ranks():
    pool = RankPool(4)
    yield pool
    pool.close()
