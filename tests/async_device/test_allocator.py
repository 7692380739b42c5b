"""The allocator has the caching allocator's rules, and its mistakes are seen."""

import subprocess
import sys
from pathlib import Path

import async_device
import pytest
import torch

SETTINGS = [(order, seed) for order in async_device.ORDERS for seed in (range(5) if order == "random" else [0])]


def freed_early(record):
    """A block of the main stream is used by a side stream, and freed while that use is queued."""
    side = torch.emulated.Stream()
    out = torch.zeros(1000, device="emulated")
    a = torch.full((1000,), 3.0, device="emulated")
    torch.emulated.synchronize()
    with torch.emulated.stream(side):
        out.copy_(a)
    if record:
        a.record_stream(side)
    address = a.data_ptr()
    del a
    b = torch.full((1000,), 7.0, device="emulated")
    assert (b.data_ptr() == address) != record
    torch.emulated.current_stream().wait_stream(side)
    return out.cpu(), b.cpu()


def test_a_use_after_free_is_reported_with_both_lines_and_shows_in_some_order(device):
    wrong = 0
    for order, seed in SETTINGS:
        device.configure(order=order, seed=seed)
        device.reset_statistics()
        out, b = freed_early(False)
        assert b.eq(7).all()
        wrong += not out.eq(3).all()
        assert any(
            "reuse of freed memory for aten::fill_" in race and "'aten::copy_' (test" in race for race in device.races()
        ), order
    assert wrong >= 2


def test_record_stream_keeps_a_block_until_its_user_is_done(device):
    for order, seed in SETTINGS:
        device.configure(order=order, seed=seed)
        out, b = freed_early(True)
        assert out.eq(3).all() and b.eq(7).all()
    assert not device.races()


def test_a_block_belongs_to_the_stream_that_allocated_it(device):
    """Allocated on a side stream, used on the main one after an event, freed, taken again by the side stream."""
    wrong = 0
    for order, seed in SETTINGS:
        device.configure(order=order, seed=seed)
        main, side = torch.emulated.current_stream(), torch.emulated.Stream()
        out = torch.zeros(1000, device="emulated")
        with torch.emulated.stream(side):
            a = torch.full((1000,), 3.0, device="emulated")
        main.wait_stream(side)
        torch.add(a, 0, out=out)
        del a
        with torch.emulated.stream(side):
            b = torch.full((1000,), 9.0, device="emulated")
        wrong += not out.cpu().eq(3).all()
        main.wait_stream(side)
        assert b.cpu().eq(9).all()
    assert wrong >= 1 and device.races()


def test_streams_that_come_after_the_allocation_write_parts_of_a_reused_block_at_once(device):
    for order, seed in SETTINGS:
        device.configure(order=order, seed=seed)
        main, sides = torch.emulated.current_stream(), [torch.emulated.Stream() for _ in range(3)]
        torch.ones(900, device="emulated")  # is freed
        block = torch.empty(900, device="emulated")
        for number, (side, part) in enumerate(zip(sides, block.chunk(3), strict=True)):
            side.wait_stream(main)
            with torch.emulated.stream(side):
                part.fill_(number)
        for side in sides:
            main.wait_stream(side)
        assert block.cpu().tolist() == [float(number) for number in range(3) for _ in range(300)]
    assert not device.races()


def test_the_block_freed_last_is_taken_first_and_filled_with_nan(device):
    a, b = torch.ones(100, device="emulated"), torch.ones(100, device="emulated")
    address = a.data_ptr()
    del b, a
    c = torch.empty(100, device="emulated")
    assert c.data_ptr() == address
    assert c.isnan().all()
    device.configure(poison=False)
    del c
    assert torch.empty(100, device="emulated").isnan().all()  # what was there


def test_storages_are_resized_as_fsdp_does(device):
    for order, seed in SETTINGS:
        device.configure(order=order, seed=seed)
        a = torch.full((256,), 2.0, device="emulated")
        total = a.sum()
        a.untyped_storage().resize_(0)
        b = torch.full((256,), 5.0, device="emulated")
        a.untyped_storage().resize_(1024)
        assert total.item() == 512 and b.sum().item() == 1280
        assert a.isnan().all()
    assert not device.races()


def test_a_freed_storage_cannot_be_used(device):
    a = torch.ones(8, device="emulated")
    a.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"whose storage is freed \[repeat: ASYNC_DEVICE_ORDER=random"):
        a.add_(1)


def test_peak_memory_is_counted_by_phase(device):
    def used(phase):
        return device.statistics()[phase]["peak_bytes"]

    kept = torch.empty(1000, dtype=torch.uint8, device="emulated")
    base = used("") - 1024
    with device.phase("one"):
        torch.empty(4096, dtype=torch.uint8, device="emulated")
    with device.phase("two"):
        pass
    assert (used("one") - base, used("two") - base) == (1024 + 4096, 1024)
    assert torch.emulated.memory_allocated() == base + 1024
    del kept


def test_the_host_dies_of_reading_device_memory():
    code = (
        "import async_device, ctypes, torch; a = torch.ones(4, device='emulated'); torch.emulated.synchronize();"
        "ctypes.string_at(a.data_ptr(), 4)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent).returncode < 0
