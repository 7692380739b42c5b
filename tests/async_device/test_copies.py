"""Copies from and to the host, and what blocks it."""

import pytest
import torch


def test_copies_of_pinned_memory_are_late(device):
    device.configure(order="compute_first", idle_ms=1000.0)
    host = torch.zeros(100).pin_memory()
    assert host.is_pinned() and not torch.zeros(1).is_pinned()
    a = torch.full((100,), 4.0, device="emulated")
    host.copy_(a, non_blocking=True)
    assert host.sum() == 0
    torch.emulated.synchronize()
    assert host.sum() == 400
    source = torch.ones(100).pin_memory()
    b = torch.empty(100, device="emulated")
    b.copy_(source, non_blocking=True)
    source.fill_(8)  # before the copy has read it
    assert b.sum().item() == 800


def test_copies_of_pageable_memory_take_what_is_there_now(device):
    device.configure(order="compute_first", idle_ms=1000.0)
    source = torch.ones(100)
    b = torch.empty(100, device="emulated")
    b.copy_(source, non_blocking=True)
    source.fill_(8)
    assert b.sum().item() == 100


def test_copies_between_devices_wait_for_both_streams(device):
    device.configure(order="side_first")
    a = torch.full((100,), 2.0, device="emulated:0")
    b = a.to("emulated:1")
    a.fill_(3)
    assert b.sum().item() == 200
    assert not device.races()


def test_host_syncs_are_counted_by_what_they_are(device):
    a = torch.ones(10, device="emulated")
    with device.phase("without"):
        for _ in range(3):
            a.mul_(2).add_(1)
        a.copy_(a.clone())
    with device.phase("with"):
        a.sum().item()
        a.nonzero()
        a.cpu()
        torch.emulated.synchronize()
    counts = device.statistics()
    assert counts["without"]["host_syncs"] == {} and counts["without"]["kernels"] == 8
    assert counts["with"]["host_syncs"] == {"item": 1, "aten::nonzero": 1, "copy to the host": 1, "synchronize": 1}


def test_host_syncs_raise_with_their_line(device):
    a = torch.ones(10, device="emulated")
    with device.no_host_sync():
        a.add_(1)
        with pytest.raises(RuntimeError, match=r"would block the host here: 'item' \(test_copies.py:.*seed|SEED"):
            a[0].item()
    a[0].item()
    device.configure(syncs="raise")
    with pytest.raises(RuntimeError, match="would block the host"):
        a.cpu()
