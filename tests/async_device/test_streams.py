"""Streams and events: what they order is right in every order; what they do not is wrong in some, and reported."""

import async_device
import pytest
import torch

SETTINGS = [(order, seed) for order in async_device.ORDERS for seed in (range(5) if order == "random" else [0])]


def two_streams(with_events):
    """The main stream makes a = 3, a side stream b = a + 1, the main stream 2 b."""
    main, side = torch.emulated.current_stream(), torch.emulated.Stream()
    a, b = torch.zeros(1000, device="emulated"), torch.zeros(1000, device="emulated")
    torch.emulated.synchronize()
    a.fill_(3)
    if with_events:
        side.wait_stream(main)
    with torch.emulated.stream(side):
        torch.add(a, 1, out=b)
    if with_events:
        main.wait_stream(side)
    return (2 * b).cpu()


def test_events_make_it_right_in_every_order(device):
    for order, seed in SETTINGS:
        device.configure(order=order, seed=seed)
        assert two_streams(True).eq(8).all(), (order, seed)
    assert not device.races()


def test_missing_events_give_wrong_values_but_in_the_order_of_issue(device):
    wrong = {}
    for order, seed in SETTINGS:
        device.configure(order=order, seed=seed)
        wrong[order, seed] = not two_streams(False).eq(8).all()
    assert not wrong["issue_order", 0]
    assert wrong["compute_first", 0] and wrong["side_first", 0]
    assert sum(wrong["random", seed] for seed in range(5)) >= 2


@pytest.mark.parametrize("order", async_device.ORDERS)
def test_missing_events_are_reported_in_every_order(device, order):
    device.configure(order=order)
    two_streams(False)
    races = " ".join(device.races())
    assert "'aten::add.out' (test_streams.py:" in races and "two_streams" in races
    assert "what 'aten::fill_.Scalar' (test_streams.py:" in races


def test_a_race_raises_with_what_repeats_it(device):
    device.configure(races="raise", order="side_first", seed=7)
    with pytest.raises(RuntimeError, match=r"race: 'aten::add.out'.*ORDER=side_first ASYNC_DEVICE_SEED=7, rank 0"):
        two_streams(False)


def test_races_can_be_off(device):
    device.configure(races="off")
    two_streams(False)
    assert not device.races()


def test_calls_return_before_anything_runs(device):
    device.configure(order="compute_first", idle_ms=1000.0)
    a = torch.ones(12345, device="emulated")  # a block of its own
    event = torch.emulated.Event(enable_timing=True)
    event.record()
    assert "stream 0: 2" in device._native.describe_queues()
    polls = 0
    while not event.query():
        polls += 1
        assert polls < 10**6
    assert a.sum().item() == 12345


def test_a_host_wait_orders_what_is_issued_after_it(device):
    side = torch.emulated.Stream()
    a = torch.full((100,), 2.0, device="emulated")
    torch.emulated.synchronize()
    with torch.emulated.stream(side):
        b = a + 1
    side.synchronize()
    assert b.sum().item() == 300
    assert not device.races()


def test_an_error_of_a_kernel_stays(device):
    device.configure(order="compute_first")
    weight = torch.ones(3, 2, device="emulated")
    torch.nn.functional.embedding(torch.tensor([7]).to("emulated"), weight)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the device failed: in 'aten::.*index.*ORDER=compute_first"):
            torch.emulated.synchronize()
    device.reset()
    torch.emulated.synchronize()


def columns(device, first, second):
    """Two streams that write columns of one matrix."""
    matrix = torch.zeros(64, 8, device="emulated")
    torch.emulated.synchronize()
    matrix[:, first].fill_(1)
    with torch.emulated.stream(torch.emulated.Stream()):
        matrix[:, second].fill_(2)
    torch.emulated.synchronize()
    return device.races()


def test_disjoint_columns_are_no_race(device):
    assert not columns(device, slice(0, 4), slice(4, 8))
    assert not columns(device, slice(0, 8, 2), slice(1, 8, 2))
    assert columns(device, slice(0, 5), slice(4, 8))


def test_overlap_of_regions_is_exact(device):
    """Against the sets of elements, for random views of one block."""
    generator = torch.Generator().manual_seed(0)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    touched = 0
    for _ in range(2000):
        views = []
        for _ in range(2):
            dims = number(1, 4)
            sizes, strides = [number(1, 5) for _ in range(dims)], [number(0, 13) for _ in range(dims)]
            views.append((sizes, strides, number(0, 40)))
        sets = [set(torch.arange(400).as_strided(*view).flatten().tolist()) for view in views]
        expected = bool(sets[0] & sets[1])
        touched += expected
        assert device._native.overlap(*views[0], *views[1]) == expected, views
    assert 200 < touched < 1800
