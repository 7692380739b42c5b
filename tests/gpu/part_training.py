"""Training on one device ends where it ends on the CPU, and nothing in it waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpu_device import Device
from gpu_part import Findings, run_part
from gpu_training import Weights, furthest, train

# Largest distance, as a share of a parameter's own change. Other kernels round otherwise, which the iteration enlarges
# with the condition number of a gradient.
BOUND = 2e-2


def check_on_one_device(
    device: Device, findings: Findings, train_on: Callable[[torch.device], tuple[Weights, Weights]]
) -> tuple[Weights, Weights, Weights]:
    """Holds the device's weights to the CPU's. Returns those before, the CPU's and the device's."""
    before, expected = train_on(torch.device("cpu"))
    _, found = train_on(device.use(0))
    off = furthest(found, expected, before)
    findings.figure(furthest_from_the_cpu=off)
    findings.check(f"weights are the CPU's within {BOUND} of their way", off <= BOUND, off)
    return before, expected, found


def part(device: Device, findings: Findings) -> None:
    """See the head of the file."""
    before, _, found = check_on_one_device(device, findings, train)
    _, guarded = train(device.use(0), guard=device.no_host_sync)
    again = furthest(guarded, found, before)
    findings.check("forward, backward, clipping and step wait for nothing, and repeat themselves", again == 0, again)


if __name__ == "__main__":
    run_part("training", part)
