"""The clock for costs and choices: times a call on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_CALLS = 4


def device_ns(call: Callable[[], object], device: torch.device) -> int:
    """Returns the nanoseconds from the begin of `call`, on an idle device, to the end of the work that it starts there.

    Reads the host's clock on CPUs. Elsewhere it takes the mean of several calls between two events on the current
    stream, so that neither the host's wait for the device counts nor its start of the first kernels. At least 1.
    """
    module = torch.get_device_module(device)
    module.synchronize(device)  # on CPUs a no-op
    if device.type == "cpu":
        begin = time.perf_counter_ns()
        call()
        return max(1, time.perf_counter_ns() - begin)
    stream = module.current_stream(device)
    begins, ends = (torch.Event(device, enable_timing=True) for _ in range(2))
    begins.record(stream)
    for _ in range(_CALLS):
        call()
    ends.record(stream)
    module.synchronize(device)
    return max(1, int(1e6 * begins.elapsed_time(ends) / _CALLS))
