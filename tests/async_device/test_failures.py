"""A program that would hang a GPU's ranks ends with an error that says why."""

import os
import time

import async_device
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks


def two_orders(order, stall_s):
    """Rank 0 uses one group before another, rank 1 the other way round."""
    async_device.configure(order=order, stall_s=stall_s)
    groups = [dist.new_group(backend="emulated"), dist.new_group(backend="emulated")]
    xs = [torch.ones(4, device="emulated"), torch.ones(4, device="emulated")]
    torch.emulated.synchronize()
    for i in (0, 1) if dist.get_rank() == 0 else (1, 0):
        dist.all_reduce(xs[i], group=groups[i], async_op=True).wait()
    begin = time.monotonic()
    try:
        torch.emulated.synchronize()
        assert all(x.sum().item() == 8 for x in xs)
        async_device.check_order()
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


PATTERN = r"ranks 0 and 1 launch .* number {n} .* is 'allreduce of group '\w+'' on rank 0 and 'allreduce of group"


def test_two_orders_hang_on_one_hardware_queue_and_are_named():
    ranks = Ranks(2)
    for text, seconds in ranks.run(two_orders, order="issue_order", stall_s=0.3):
        assert "launch communication in different orders" in text and "on rank 0" in text
        assert seconds < 10
    ranks.close()


def test_two_orders_that_do_not_hang_are_named_at_the_end():
    ranks = Ranks(2)
    for text, _ in ranks.run(two_orders, order="side_first", stall_s=5.0):
        assert "number 1 of what they have in common is 'allreduce of group" in text
    ranks.close()


def same_order():
    """Groups that only some ranks share, messages and batches of them."""
    rank = dist.get_rank()
    row = dist.new_group([0, 1], backend="emulated")
    x, y = torch.ones(4, device="emulated"), torch.ones(4, device="emulated")
    if rank < 2:
        dist.all_reduce(x, group=row)
    dist.all_reduce(x)
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(y, 0)
    if rank > 0:
        other = 3 - rank
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]):
            work.wait()
    dist.all_reduce(x)
    torch.emulated.synchronize()
    async_device.check_order()
    async_device.check_order()


def test_one_order_is_none_to_complain_of():
    ranks = Ranks(3)
    ranks.run(same_order)
    ranks.close()


def lost_peer():
    x = torch.ones(4, device="emulated")
    dist.all_reduce(x)
    torch.emulated.synchronize()
    if dist.get_rank() == 1:
        os._exit(1)
    dist.all_reduce(x)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        torch.emulated.synchronize()
    return str(caught.value), time.monotonic() - begin


def test_a_lost_peer_is_an_error_of_the_device():
    ranks = Ranks(2)
    (kind, answer), (other, _) = ranks.answers(lost_peer)
    ranks.close()
    assert (kind, other) == ("ok", "died"), answer
    text, seconds = answer
    assert "the device failed: in 'allreduce of group '0''" in text and "rank 0]" in text
    assert seconds < 10


def abort():
    """Rank 0 waits for what rank 1 never does."""
    group = dist.new_group(backend="emulated")
    x, y = torch.ones(4, device="emulated"), torch.ones(4, device="emulated")
    if dist.get_rank() == 1:
        dist.all_reduce(y)
        return y.cpu(), "", ""
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    group._get_backend(torch.device("emulated")).abort()
    with pytest.raises(RuntimeError) as waited:
        torch.emulated.synchronize()
    with pytest.raises(RuntimeError) as issued:
        dist.all_reduce(x, group=group)
    dist.all_reduce(y)  # other groups go on
    return y.cpu(), str(waited.value), str(issued.value)


def test_abort_ends_what_waits_and_names_the_group():
    ranks = Ranks(2)
    (sum_0, waited, issued), (sum_1, _, _) = ranks.run(abort)
    ranks.close()
    assert sum_0.eq(2).all() and sum_1.eq(2).all()
    assert "group '1' was aborted" in waited.replace(waited.split("'")[1], "1") and "was aborted" in issued
