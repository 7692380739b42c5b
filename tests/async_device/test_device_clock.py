"""The clock of costs and choices counts the work of a device after the host's call, and no work before the call."""

from __future__ import annotations

import time

import torch
from dmuon._planning.clock import device_ns

SIZE = 700


def test_work_after_the_call_counts_and_work_before_it_does_not(device):
    device.configure(order="compute_first", idle_ms=1000.0)
    a = torch.ones(SIZE, SIZE, device="emulated")

    def multiply(times):
        for _ in range(times):
            torch.mm(a, a)

    multiply(1)
    torch.emulated.synchronize()
    begin = time.perf_counter_ns()
    multiply(20)
    returned = time.perf_counter_ns() - begin  # the products are queued
    after = device_ns(lambda: multiply(20), torch.device("emulated"))
    total = time.perf_counter_ns() - begin
    assert returned < after < total - after / 4, "both took alike, one of them is timed"
    none = device_ns(lambda: None, torch.device("emulated"))
    assert 1 <= none < after / 4
