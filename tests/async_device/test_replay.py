"""A recorded schedule happens again, exactly, whatever the order and the clock."""

import os
import subprocess
import sys
from pathlib import Path

import async_device
import torch
import torch.distributed as dist


def racing():
    """Two streams add to and multiply the same numbers, so the result depends on the order."""
    a = torch.ones(4, dtype=torch.float64, device="emulated")
    torch.emulated.synchronize()
    sides = [torch.emulated.Stream() for _ in range(3)]
    done = []
    for i in range(30):
        with torch.emulated.stream(sides[i % 3]):
            a.mul_(1.5) if i % 2 else a.add_(1)
        if i % 10 == 0:
            done.append(torch.emulated.Event())
            done[-1].record(sides[0])
            polls = 1
            while not done[-1].query():
                polls += 1
            done[-1] = polls
    torch.emulated.synchronize()
    return a[0].item(), done


def test_a_schedule_is_replayed_exactly(device):
    recorded, values = [], set()
    for seed in range(200):  # on a busy machine the device has few kernels at once to choose from, and values repeat
        device.configure(order="random", seed=seed)
        with device.recording() as schedule:
            result = racing()
        if result[0] not in values:
            values.add(result[0])
            recorded.append((schedule, result))
        if len(recorded) == 4:
            break
    assert len(recorded) == 4
    for order in async_device.ORDERS:
        device.configure(order=order, hang_s=5.0)
        for schedule, result in recorded:
            with device.replaying(schedule):
                assert racing() == result


def test_another_program_fails_and_does_not_hang(device):
    with device.recording() as schedule:
        racing()
    device.configure(hang_s=0.5)
    with device.replaying(schedule):
        try:
            torch.ones(4, device="emulated").sum().item()
            failed = ""
        except RuntimeError as error:
            failed = str(error)
    assert "does not follow the recorded schedule" in failed


def communicating():
    """As `racing`, on both sides of collectives."""
    x, z = torch.ones(100, device="emulated"), torch.ones(1, dtype=torch.float64, device="emulated")
    torch.emulated.synchronize()
    side = torch.emulated.Stream()
    for _ in range(5):
        work = dist.all_reduce(x, async_op=True)
        z.mul_(1.5)
        with torch.emulated.stream(side):
            work.wait()
            z.add_(1)
    torch.emulated.current_stream().wait_stream(side)
    return z.item(), x.sum().item()


def communicate():
    dist.all_reduce(torch.ones(100, device="emulated"))  # a group waits for its call before, if there is one
    async_device.configure(seed=dist.get_rank(), hang_s=5.0)
    with async_device.recording() as schedule:
        first = communicating()
    for order in async_device.ORDERS:
        async_device.configure(order=order, hang_s=5.0)
        with async_device.replaying(schedule):
            assert communicating() == first, order


def test_communication_is_replayed_too(make_ranks):
    make_ranks(2).run(communicate)


PROGRAM = "import async_device, test_replay; print(test_replay.racing())"


def test_a_process_is_replayed_from_a_file(tmp_path):
    def output(**variables):
        environment = {**os.environ, **variables}
        here = Path(__file__).parent
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=here, env=environment, capture_output=True, text=True
        )

    first = output(ASYNC_DEVICE_SEED="3", ASYNC_DEVICE_RECORD=str(tmp_path))
    again = output(ASYNC_DEVICE_ORDER="issue_order", ASYNC_DEVICE_REPLAY=str(tmp_path))
    assert first.stdout and again.stdout == first.stdout, (first, again)
