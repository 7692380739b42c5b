"""What all Python tests have in common."""

import os
import subprocess
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

# What is measured or tuned is kept for the session; what the user has kept is not seen.
_cache = tempfile.TemporaryDirectory(prefix="dmuon-cache-")
os.environ["DMUON_CACHE_DIR"] = _cache.name

# gloo_rests.cpp, for the processes that tests start; without it these take longer.
_gloo_rests = Path(__file__).parents[1] / "build/release/tests/libgloo_rests.so"
if _gloo_rests.exists():
    os.environ["LD_PRELOAD"] = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(_gloo_rests)]))

COSTLY = ("async_device", "distributed", "examples", "kernels", "programs")  # folders whose tests take seconds each


def pytest_addoption(parser: pytest.Parser) -> None:
    words = f"run one case in N of each parametrized test of {', '.join(COSTLY)}; the commit draws which [1: all]"
    parser.addoption("--share", type=int, default=1, metavar="N", help=words)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_case: --share leaves none of its cases out")
    config.addinivalue_line("markers", "rarer(times): --share N runs one of its cases in N * times")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (share := config.getoption("share")) == 1:
        return
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    families = defaultdict(list)
    times_rarer: dict[object, int] = defaultdict(lambda: 1)
    for item in items:
        is_costly = item.path.relative_to(Path(__file__).parent).parts[0] in COSTLY
        if is_costly and hasattr(item, "callspec") and item.get_closest_marker("every_case") is None:
            families[item.path, item.originalname].append(item)
            if (rarer := item.get_closest_marker("rarer")) is not None:
                times_rarer[item.path, item.originalname] = rarer.args[0]
    left_out = set()
    for family, cases in families.items():
        drawn = sorted(cases, key=lambda item: zlib.crc32(f"{commit} {item.callspec.id}".encode()))
        left_out |= set(drawn[-(-len(cases) // (share * times_rarer[family])) :])
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))
