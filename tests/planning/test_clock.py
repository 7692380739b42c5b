"""Times on CPUs; tests/async_device has those on a device that runs later than the host."""

from __future__ import annotations

import time

import torch
from dmuon._planning.clock import device_ns

CPU = torch.device("cpu")


def test_the_call_alone_is_timed_and_runs_once():
    calls = []
    ns = device_ns(lambda: (calls.append(None), time.sleep(0.02)), CPU)
    assert len(calls) == 1
    assert 20_000_000 <= ns < 20_000_000_000


def test_no_time_is_zero():
    assert device_ns(lambda: None, CPU) >= 1
