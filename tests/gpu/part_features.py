"""A training with what users add ends where it ends on the CPU: on one device, and on ranks that share it."""

from __future__ import annotations

from gpu_device import Device
from gpu_features import train
from gpu_part import Findings, run_part
from part_nccl import check_ranks
from part_training import check_on_one_device


def part(device: Device, findings: Findings) -> None:
    """See the head of the file."""
    before, expected, _ = check_on_one_device(device, findings, train)
    check_ranks(device, findings, "gpu_features.py", ((1, 2), (2, 1)), before, expected)


if __name__ == "__main__":
    run_part("features", part)
