"""A rank may fork a child that ends as Python does, with destructors: it has none of the threads of process groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

NUM_RANKS = 2
DEADLINE_S = 60  # a limit for hangs: a child takes less than a second


@pytest.mark.cpu("its groups are gloo's")
def test_a_forked_child_of_a_rank_exits_and_the_rank_trains_on(tmp_path: Path):
    done = subprocess.run([sys.executable, __file__, tmp_path / "store"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def play(rank: int, store: str) -> None:
    """Trains, forks a child that exits at once, and trains on."""
    dist.init_process_group("gloo", store=dist.FileStore(store, NUM_RANKS), rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    dmuon.dedicate_params(model, mesh=mesh, sync_from_rank0=True)
    fully_shard(model, mesh=mesh)
    opt = dmuon.Muon(model)

    def train() -> None:
        model(torch.randn(4, 32)).sum().backward()
        opt.step()
        opt.zero_grad()

    train()
    child = os.fork()
    if child == 0:
        signal.alarm(DEADLINE_S)
        sys.exit()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child of rank {rank} ended with {os.waitstatus_to_exitcode(status)}"
    train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    pids = {}
    for rank in range(NUM_RANKS):
        pids[rank] = os.fork()
        if pids[rank] == 0:
            play(rank, sys.argv[1])
            sys.exit()
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids.values()]
    sys.exit(any(ends))
