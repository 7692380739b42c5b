"""What the ranks of an emulated cluster run, see test_cluster.py: communication, bandwidth, three steps of training."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from models import make_gpt
from pool import make_mesh
from scenario import Session, assert_equal_to_reference, run_scenario
from training import AHEAD


def three_steps(session: Session) -> None:
    session.start(make_gpt())
    session.train(0, 1, 2)


def seconds_to_send(receiver: int, num_bytes: int) -> float:
    """From rank 0; what rank 0 measures."""
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == 0:
        dist.send(data, receiver)
    elif dist.get_rank() == receiver:
        dist.recv(data, 0)
    dist.barrier()
    return time.monotonic() - start


def main(bits_per_s: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks_a_node = int(os.environ["LOCAL_WORLD_SIZE"])
    assert (int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])) == divmod(rank, ranks_a_node)
    nodes: list[str] = [""] * size
    dist.all_gather_object(nodes, os.readlink("/proc/self/ns/net"))
    assert [nodes.index(node) for node in nodes] == [i // ranks_a_node * ranks_a_node for i in range(size)]

    total = torch.tensor([2.0**rank])
    dist.all_reduce(total)
    assert total.item() == 2**size - 1

    num_bytes = 2_500_000
    within, between = (seconds_to_send(receiver, num_bytes) for receiver in (1, ranks_a_node))
    if rank == 0:
        least = 0.9 * 8 * num_bytes / bits_per_s  # an idle link sends a little at once
        assert between >= least, f"{between:.3f} s between nodes, at least {least:.3f} s expected"
        assert within < between

    mesh = make_mesh((size // ranks_a_node, ranks_a_node))
    initial, expected, _ = run_scenario(None, three_steps, AHEAD, reference_size=size)
    _, got, _ = run_scenario(mesh, three_steps, AHEAD)
    assert_equal_to_reference(initial, expected, got)
    dist.barrier()
    if rank == 0:
        print("all is well")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]))
