"""Models that threads train, and trainings that follow each other in one process."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import batch, loss_of, make_gpt
from pool import end_workers, start_workers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon

STEPS = 40


def weights_after_training(model: nn.Module) -> torch.Tensor:
    dmuon.dedicate_params(model, costs="modelled")
    opt = dmuon.Muon(model, ns_dtype=torch.float32)
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    with dmuon.full_params(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_threads_may_train_one_model_each():
    expected = [weights_after_training(make_gpt(seed, depth=2)) for seed in range(2)]
    models = [make_gpt(seed, depth=2) for seed in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(weights_after_training, models)]
    assert all(map(torch.equal, found, expected))


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def cycles(rank: int, path: str, connection: Any) -> None:
    """Begins and ends a world again and again. Sends this process's numbers of threads and open files in each."""
    counts = []
    torch.set_num_threads(1)
    for cycle in range(4):
        store = dist.FileStore(f"{path}{cycle}", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        model = make_gpt(depth=2)
        dmuon.dedicate_params(model, mesh, costs="modelled")
        fully_shard(model, mesh=mesh)
        opt = dmuon.Muon(model)
        loss_of(model, batch(rank)).backward()
        opt.step()
        # Ahead of the block's own hooks: the forward owes its weights to the other rank.
        model.blocks[1].register_forward_pre_hook(interrupt, prepend=True)
        with suppress(KeyboardInterrupt):
            model(batch(rank))
        del model, opt, mesh
        gc.collect()
        dist.destroy_process_group()
        counts.append([len(os.listdir(f"/proc/self/{of}")) for of in ("task", "fd")])
    connection.send(counts)


@pytest.mark.cpu("its groups are gloo's")
def test_a_world_that_was_destroyed_keeps_no_threads_and_files(tmp_path):
    workers = start_workers(cycles, 2, str(tmp_path / "store"))
    try:
        for _, connection in workers:
            assert connection.poll(120), "a rank hangs"
            _, second, _, last = connection.recv()  # the next cycle drops what the last one has left
            assert all(after < before + 10 for before, after in zip(second, last, strict=True))  # it kept 14 and more
    finally:
        end_workers(workers)


IN_BACKWARD = pytest.param("backward", marks=pytest.mark.cpu("elsewhere hooks run in threads of autograd's"))


@pytest.mark.parametrize("during", ["forward", "forward after an inner one", IN_BACKWARD, "step"])
@pytest.mark.parametrize("call", ["a forward", "step()", "state_dict()"])
def test_a_second_thread_is_refused_during_a_pass_or_step(during, call):
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, costs="modelled")
    opt = dmuon.Muon(model)
    calls = {"a forward": lambda: model(batch(0)), "step()": opt.step, "state_dict()": model.state_dict}
    errors = []

    def in_another_thread(*_: Any) -> None:
        with ThreadPoolExecutor(1, "second") as threads:
            errors.extend(threads.submit(calls[call]).exception() for _ in range(2))

    def inner(*_: Any) -> None:
        handle.remove()
        with torch.no_grad():
            model(batch(0))
        in_another_thread()

    if during == "forward":
        model.blocks[0].up.register_forward_hook(in_another_thread)
    elif during == "forward after an inner one":
        handle = model.blocks[0].up.register_forward_hook(inner)
    elif during == "backward":
        model.blocks[0].up.register_full_backward_hook(in_another_thread)
    else:
        opt.register_step_pre_hook(lambda *_: setattr(opt._adamw, "step", in_another_thread))
    loss_of(model, batch(0)).backward()
    opt.step()
    assert len(errors) == 2
    for error in errors:
        assert str(error).startswith(f"dmuon: {call} in thread 'second_0' while another thread is in a pass or a step")
