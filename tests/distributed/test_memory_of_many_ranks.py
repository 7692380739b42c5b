"""What is done with the whole model, and to set it up, takes no more memory on many ranks than on few.

On 2 and 4 ranks the tensors are counted that torch's allocator of the CPU, or the emulated device's, has given out; on
one rank of 16 and of 256, whose others are not there, also what Python holds.
"""

from __future__ import annotations

import contextlib
import importlib
import tracemalloc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from accounting import FP32, Counted
from dmuon._saving import owned_shards
from pool import RankPool, end_workers, make_mesh, start_workers
from torch.distributed.fsdp import fully_shard
from training import AHEAD, dedicate

import dmuon

pytestmark = pytest.mark.cpu("it names its devices")
WIDTH, DEPTH = 128, 36
MATRIX = FP32 * WIDTH * WIDTH
LIMIT_S = 300  # for hangs


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def whole_model_operations(mesh: Any, strategy: str = "load_balance") -> dict[str, tuple[int, int]]:
    """Under one name each: a start from values on every rank, verify, full_params, one on the meta device, a load."""
    device = mesh.device_type
    options = {"strategy": strategy}
    with Counted(device) as counted:
        torch.manual_seed(0)
        model = make_model().to(device)
        with counted.during("start"):
            dedicate(model, mesh, AHEAD, **options)
            optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        with counted.during("verify"):
            dmuon.verify(model, optimizer)
        with counted.during("full_params"), dmuon.full_params(model, writeback=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        del model, optimizer
        with counted.during("meta start"):
            with torch.device("meta"):
                model = make_model().bfloat16()
            dedicate(model, mesh, AHEAD, **options)
            fully_shard(model, mesh=mesh)
            model.to_empty(device=device)
            for parameter in model.parameters():
                nn.init.normal_(parameter)
            optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        assert optimizer.state
        state = model.state_dict()
        with mock.patch.object(owned_shards, "_PIECE", 2 * WIDTH**2), counted.during("load_state_dict"):
            model.load_state_dict(state)
    return counted.found()


@pytest.fixture(scope="module")
def device_ranks():
    pool = RankPool(4, device_type="emulated")
    yield pool
    pool.close()


@pytest.mark.xdist_group("async_device")
@pytest.mark.parametrize("kind", ["ranks", "device_ranks"])
def test_four_ranks_hold_no_more_than_two(request, kind):
    pool = request.getfixturevalue(kind)
    found = {mesh: pool.run(whole_model_operations, mesh) for mesh in [(2,), (4,), (2, 2)]}
    for mesh, results in found.items():
        state = 3 * DEPTH // len(results)  # matrices: masters, momentum, gradients
        copies = DEPTH // mesh[1] if len(mesh) > 1 else 0  # of what other nodes own
        most = {
            "start": state + copies + 1,
            "verify": 12 + (2 if len(mesh) > 1 else 0),  # between nodes a mean, and an inbox for it
            "full_params": DEPTH + 9,  # of bytes that are added up torch makes 64-bit numbers
            "meta start": state + copies / 2 + state / 6 + 2,  # what a rank has initialised goes as owners take it
            "load_state_dict": 8,
        }
        for result in results:
            for name, matrices in most.items():
                assert result[name][0] <= matrices * MATRIX, f"{name} on {mesh}: {result[name][0] / MATRIX} matrices"


def _work_alone(rank: int, num_ranks: int, connection: Any) -> None:
    """The first rank of many, of whom no other is there."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    new_group = dist.new_group
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=dist.HashStore())
    dist.new_group = lambda *args, **kwargs: new_group(*args, **{**kwargs, "backend": "fake"})
    connection.send(memory_alone(num_ranks))


def memory_alone(num_ranks: int) -> dict[str, tuple[int, int]]:
    """By what was done: most bytes at once of tensors, and of what Python itself holds."""
    mesh, python = make_mesh((num_ranks // 8, 8)), {}

    @contextlib.contextmanager
    def during(name: str) -> Iterator[None]:
        tracemalloc.start()
        with counted.during(name):
            yield
        python[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    with Counted("cpu") as counted:
        torch.manual_seed(0)
        model = make_model()
        with during("start"):
            # It owns all, so that it has as much to do among many as among few.
            dedicate(model, mesh, AHEAD, strategy="rank0")
            optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        with during("verify"):
            dmuon.verify(model, optimizer)
        with during("full_params"), dmuon.full_params(model, writeback=True):
            pass
    return {name: (most, python[name]) for name, (most, _) in counted.found().items()}


def test_one_of_256_ranks_holds_no_more_than_one_of_16():
    found = {}
    for num_ranks in (16, 256):
        ((_, connection),) = workers = start_workers(_work_alone, 1, num_ranks)
        assert connection.poll(LIMIT_S), "no answer in time"
        found[num_ranks] = connection.recv()
        end_workers(workers)
    for name, (tensors, python) in found[256].items():
        tensors_of_few, python_of_few = found[16][name]
        # The agreement of a step has two words for each rank, a plan some numbers.
        assert tensors <= tensors_of_few + (256 - 16) * 16, name
        assert python <= python_of_few + (256 - 16) * 512, f"{name}: {found}"
