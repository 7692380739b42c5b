"""What all Python tests have in common."""

import os
import tempfile
from pathlib import Path

# What is measured or tuned is kept for the session; what the user has kept is not seen.
_cache = tempfile.TemporaryDirectory(prefix="dmuon-cache-")
os.environ["DMUON_CACHE_DIR"] = _cache.name

# gloo_rests.cpp, for the processes that tests start; without it these take longer.
_gloo_rests = Path(__file__).parents[1] / "build/release/tests/libgloo_rests.so"
if _gloo_rests.exists():
    os.environ["LD_PRELOAD"] = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(_gloo_rests)]))
