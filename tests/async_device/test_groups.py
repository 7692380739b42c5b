"""Collectives and messages give what gloo gives on CPUs, are ordered by streams alone, and are counted."""

import async_device
import pytest
import torch
import torch.distributed as dist


def inputs(rank, count=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-50, 50, (count,), generator=generator).to(dtype)


def all_reduce(rank, size, x, group):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        y = x.clone()
        dist.all_reduce(y, op, group=group)
        yield y


def broadcast(rank, size, x, group):
    y = x.clone()
    dist.broadcast(y, size - 1, group=group)
    yield y


def reduce(rank, size, x, group):
    y = x.clone()
    dist.reduce(y, 1, group=group)
    yield y if rank == 1 else x


def all_gather(rank, size, x, group):
    out = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(out, x, group=group)
    yield torch.stack(out)
    flat = x.new_empty(size * x.numel())
    dist.all_gather_into_tensor(flat, x, group=group)
    yield flat


def reduce_scatter(rank, size, x, group):
    out = x.new_empty(x.numel() // size)
    dist.reduce_scatter_tensor(out, x, group=group)
    yield out


def all_to_all(rank, size, x, group):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    yield out


def gather_and_scatter(rank, size, x, group):
    parts = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
    dist.gather(x, parts, 0, group=group)
    out = torch.empty_like(x)
    dist.scatter(out, None if parts is None else [part * 2 for part in parts], 0, group=group)
    yield out


def messages(rank, size, x, group):
    y = torch.empty_like(x)
    after, before = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        dist.send(x, after, group=group)
        dist.recv(y, before, group=group)
    else:
        dist.recv(y, before, group=group)
        dist.send(x, after, group=group)
    yield y
    z = torch.empty_like(x)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, y, after, group), dist.P2POp(dist.irecv, z, before, group)])
    for work in works:
        work.wait()
    yield z


CALLS = [all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all, gather_and_scatter, messages]


def results_equal_gloo():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    for order in async_device.ORDERS:
        async_device.configure(order=order, seed=rank)
        for call in CALLS:
            x = inputs(rank)
            theirs = list(call(rank, size, x, group))
            ours = list(call(rank, size, x.to("emulated") * 1, group))
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a.cpu(), b), (order, call.__name__, a.cpu(), b)
    return async_device.races()


@pytest.mark.parametrize("size", [2, 4])
def test_results_are_those_of_gloo(make_ranks, size):
    assert make_ranks(size).run(results_equal_gloo) == [[]] * size


def nccl_alone():
    rank, size = dist.get_rank(), dist.get_world_size()
    xs = torch.stack([inputs(r) for r in range(size)])
    x = xs[rank].to("emulated")
    average = x.clone()
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert torch.equal(average.cpu(), xs.sum(0) / size)
    scaled = x.new_empty(12 // size)
    dist.reduce_scatter_tensor(scaled, x, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(scaled.cpu(), (xs.sum(0) / 2).chunk(size)[rank])
    whole = x.new_zeros(12 * size)
    whole.chunk(size)[rank].copy_(x)
    dist.all_gather_into_tensor(whole, whole.chunk(size)[rank])  # in place
    assert torch.equal(whole.cpu(), xs.flatten())
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_to_all(parts, [x + r for r in range(size)])
    assert torch.equal(torch.stack(parts).cpu(), xs + rank)


def test_what_nccl_can_and_gloo_cannot(make_ranks):
    make_ranks(2).run(nccl_alone)


def wait_is_of_streams():
    x = torch.ones(100, device="emulated")
    torch.emulated.synchronize()
    async_device.reset_statistics()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    y = x + 1
    counted = async_device.statistics()[""]["host_syncs"]
    assert y.eq(dist.get_world_size() + 1).all()
    assert not async_device.races()
    dist.all_reduce(x, async_op=True)
    x.add_(1)  # without a wait
    torch.emulated.synchronize()
    (race,) = async_device.races()
    return counted, race


def test_wait_blocks_a_stream_and_not_the_host_and_a_missing_one_is_a_race(make_ranks):
    for counted, race in make_ranks(2).run(wait_is_of_streams):
        assert counted == {}
        assert "race: 'aten::add_.Tensor' (test_groups.py" in race and "'allreduce of group '0' #" in race


def counts():
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("emulated", rank)
    x, out = torch.ones(100, device=device), torch.empty(100 * size, device=device)
    with async_device.phase("alone"):
        dist.all_gather_into_tensor(out, x)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
    with async_device.phase("together"):
        with dist._coalescing_manager(device=device, async_ops=True) as works:
            for _ in range(5):
                dist.broadcast(x, 0)
        works.wait()
        if rank < 2:
            other = 1 - rank
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty_like(x), other)]
            ):
                work.wait()
    torch.emulated.synchronize()
    keys = ("communication_launches", "messages", "bytes_sent")
    return [tuple(async_device.statistics()[name][key] for key in keys) for name in ("alone", "together")]


def test_launches_messages_and_bytes_are_counted(make_ranks):
    (alone_0, together_0), (alone_1, together_1) = make_ranks(2).run(counts)
    assert alone_0 == (3, 3, 400 + 400 + 400) and alone_1 == (3, 3, 400 + 400)
    assert together_0 == (2, 7, 5 * 400 + 400) and together_1 == (2, 7, 400)


def barrier_blocks():
    dist.barrier(device_ids=[dist.get_rank()])
    return async_device.statistics()[""]["host_syncs"]


def test_a_barrier_blocks_the_host(make_ranks):
    assert make_ranks(2).run(barrier_blocks) == [{"barrier": 1}] * 2
