"""Memory over many steps: the engine's peak beside the plan's, no growth, and no retries of the allocator."""

from __future__ import annotations

import torch
import torch.nn as nn
from gpu_device import Device
from gpu_part import Findings, run_part

import dmuon

STEPS, SETTLED = 100, 10


def part(device: Device, findings: Findings) -> None:
    """See the head of the file."""
    where = device.use(0)
    width, num_blocks = (2048, 16) if device.is_real else (64, 4)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_blocks))).to(where)
    bare = 4 * width * width * num_blocks
    dmuon.dedicate_params(model, costs="modelled")
    optimizer = dmuon.Muon(model, lr=1e-3)
    x = torch.randn(16, width, device=where)
    settled = 0
    for step in range(STEPS):
        if step == SETTLED:
            device.synchronize()
            settled = held(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    device.synchronize()
    peak, planned = int(optimizer.stats()["peak_bytes"]), optimizer.plan.memory_bytes[0]
    findings.figure(weights=bare, engine_peak=peak, planned=planned, held=held(device), held_early=settled)
    findings.check("the engine's peak is within the plan's", 0 < peak <= planned, f"{peak} of {planned}")
    findings.check("no more is held after the last step than after ten", held(device) <= settled, held(device))
    if not device.is_real:
        findings.leave_out("the allocator's retries, and what PyTorch takes beside the engine")
        return
    stats = torch.cuda.memory_stats()
    findings.figure(allocated_peak=stats["allocated_bytes.all.peak"], reserved_peak=stats["reserved_bytes.all.peak"])
    findings.check("the allocator never had to retry", stats["num_alloc_retries"] == 0, stats["num_alloc_retries"])


def held(device: Device) -> int:
    """Bytes that are allocated on the device."""
    return int(torch.get_device_module(device.kind).memory_allocated())


if __name__ == "__main__":
    run_part("memory", part)
