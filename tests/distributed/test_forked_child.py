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


def child_of_one_process() -> None:
    """Trains, forks a child that trains a model of its own but not its parent's, and trains on."""

    def made() -> tuple[nn.Module, dmuon.Muon]:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        dmuon.dedicate_params(model, costs="modelled", late_updates=True)
        return model, dmuon.Muon(model)

    def train(model: nn.Module, opt: dmuon.Muon) -> None:
        model(torch.randn(4, 32)).sum().backward()
        opt.step()
        opt.zero_grad()

    parents = made()
    train(*parents)
    child = os.fork()
    if child == 0:
        signal.alarm(DEADLINE_S)
        for use in (lambda: train(*parents), parents[0].state_dict, parents[1].step, parents[1].state_dict):
            with pytest.raises(RuntimeError, match=r"in a process that was forked .*start_method='spawn'"):
                use()
        own = made()
        train(*own)
        own[0].state_dict()
        sys.exit()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"
    train(*parents)


@pytest.mark.cpu("devices have no forked children")
def test_a_forked_child_trains_a_model_of_its_own_alone():
    command = [sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10 * DEADLINE_S)
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
    if len(sys.argv) == 1:
        child_of_one_process()
        sys.exit()
    pids = {}
    for rank in range(NUM_RANKS):
        pids[rank] = os.fork()
        if pids[rank] == 0:
            play(rank, sys.argv[1])
            sys.exit()
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids.values()]
    sys.exit(any(ends))
