"""What users add to a training ends on one device, and on ranks that share it, where it ends on the CPU."""

from __future__ import annotations

import torch
from gpu_device import Device
from gpu_features import train
from gpu_part import Findings, run_part
from gpu_training import furthest
from part_nccl import check_ranks
from part_training import BOUND


def part(device: Device, findings: Findings) -> None:
    """See the head of the file."""
    before, expected = train(torch.device("cpu"))
    _, found = train(device.use(0))
    off = furthest(found, expected, before)
    findings.figure(furthest_from_the_cpu=off)
    findings.check(f"weights are the CPU's within {BOUND} of their way", off <= BOUND, off)
    check_ranks(device, findings, "gpu_features.py", ((1, 2), (2, 1)), before, expected)


if __name__ == "__main__":
    run_part("features", part)
