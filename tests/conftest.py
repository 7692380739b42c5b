"""What all Python tests have in common."""

import os
import tempfile

# What is measured or tuned is kept for the session; what the user has kept is not seen.
_cache = tempfile.TemporaryDirectory(prefix="dmuon-cache-")
os.environ["DMUON_CACHE_DIR"] = _cache.name
