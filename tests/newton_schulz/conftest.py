import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Small products on oversubscribed cores wait for each other; tests of threading set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
