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
    """On CPUs; with DMUON_TEST_DEVICE=emulated on the asynchronous device, where a race is a failure."""
    device_type = os.environ.get("DMUON_TEST_DEVICE", "cpu")
    pool = RankPool(4, device_type=device_type, is_default=device_type != "cpu")
    yield pool
    pool.close()
