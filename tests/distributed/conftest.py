import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from default_device import as_default_device
from pool import TEST_DEVICE, RankPool, use_emulated_device

if TEST_DEVICE != "cpu":
    use_emulated_device(0)  # before a first backward, at which autograd counts devices


def pytest_configure(config):
    config.addinivalue_line("markers", "cpu(reason): it says nothing of another device (DMUON_TEST_DEVICE)")


def pytest_collection_modifyitems(items):
    for item in items:
        marker = item.get_closest_marker("cpu")
        if marker and TEST_DEVICE != "cpu":
            item.add_marker(pytest.mark.skip(reason=f"of CPUs: {marker.args[0]}"))


@pytest.fixture(scope="session")
def ranks():
    """On CPUs; with DMUON_TEST_DEVICE=emulated on the asynchronous device, where a race is a failure."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def one_process(request):
    """Tests without ranks are programs of one process, which runs on the same device."""
    if TEST_DEVICE == "cpu" or "ranks" in request.fixturenames:
        yield
        return
    with as_default_device(0):
        yield
