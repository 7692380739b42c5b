"""A rank of the self-test: trains by dmuon's public functions, compares, and times the messages that dmuon sends."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon
from dmuon._doctor.findings import Findings

_WIDTH, _BLOCKS, _STEPS, _BATCH = 48, 2, 3, 8
# The largest distance, as a part of a parameter's own change. Other sums round otherwise, and the iteration enlarges
# the difference by a gradient's condition number.
_FURTHEST = 2e-2
_TIMEOUT = datetime.timedelta(seconds=60)
_TIMES = 7
_ELEMENTS = 4 << 20  # of bf16: 8 MiB, about a unit's part
_WORDS = 256

Weights = dict[str, Tensor]


class Spot(NamedTuple):
    """The place of a rank in a test of two."""

    test: str
    rank: int
    store: str  # a file that is not there yet, at which the ranks meet
    device: str
    environment: dict[str, str]  # besides torchrun's


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def one_process(findings: Findings, device: str) -> None:
    """Trains on one device without ranks, and compares with the CPU."""
    _alone()
    before, expected = _trained(torch.device("cpu"), None)
    _compare(findings, f"1 process on {device}", before, expected, _trained(_used(device), None)[1])


def rank(findings: Findings, spot: Spot) -> None:
    """Trains on both meshes of two ranks; the first rank reports."""
    _alone()
    before, expected = _trained(torch.device("cpu"), None)
    device = _join(spot)
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        _, found = _trained(device, mesh)
        if spot.rank == 0:
            _compare(findings, f"{spot.test}, mesh {shape[0]}x{shape[1]}", before, expected, found)
    for name, took in _messages(device, spot.rank).items():
        if spot.rank == 0:
            findings.fact(f"{device} {name}", took)
    dist.destroy_process_group()


def rendezvous(_: Findings, spot: Spot) -> None:
    """Does nothing else: the backend may refuse two ranks on one device."""
    _join(spot)


def _alone() -> None:
    torch.set_num_threads(1)
    os.environ["DMUON_CACHE_DIR"] = ""  # the test does not depend on what was tuned, and stores nothing


def _used(name: str) -> torch.device:
    device = torch.device(name)
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    return device


def _join(spot: Spot) -> torch.device:
    """Makes the default process group, as a program on this device would, and sends one message."""
    device = _used(spot.device)
    # PyTorch takes the device by LOCAL_RANK, and both ranks may have one.
    os.environ.update(spot.environment, LOCAL_RANK=str(device.index or 0), LOCAL_WORLD_SIZE="2")
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    if spot.environment:
        os.environ["NCCL_HOSTID"] = f"doctor{spot.rank}"
    own = dist.get_default_backend_for_device(device)
    backends = own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"
    store = dist.FileStore(spot.store, 2)  # type: ignore[attr-defined]
    dist.init_process_group(backends, store=store, rank=spot.rank, world_size=2, timeout=_TIMEOUT)
    word = torch.ones(1, device=device)
    dist.all_reduce(word)
    assert word.item() == 2, word
    return device


def _trained(device: torch.device, mesh: DeviceMesh | None) -> tuple[Weights, Weights]:
    """Returns all weights on the CPU, before and after training. A rank takes its part of each batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block() for _ in range(_BLOCKS)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = torch.randn(_STEPS, _BATCH, _WIDTH)
    if mesh is not None:
        data = data.chunk(2, dim=1)[dist.get_rank()]
    data, model = data.to(device), model.to(device)
    dmuon.dedicate_params(model, mesh, costs="modelled")
    for module in (*model, model) if mesh is not None else ():
        fully_shard(module, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=1e-2, ns_dtype=torch.float32)
    for step in range(_STEPS):
        (model(data[step]) - data[step].roll(1, -1)).square().mean().backward()
        dmuon.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    after = {name: _whole(value).cpu() for name, value in model.state_dict().items()}
    return before, after


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value


def _compare(findings: Findings, name: str, before: Weights, expected: Weights, found: Weights) -> None:
    ways = (((found[one] - end).norm() / (end - before[one]).norm()).item() for one, end in expected.items())
    off = max(way if way == way else float("inf") for way in ways)
    findings.check(name, off <= _FURTHEST, f"{off:.1e} of the way from one process's weights, at most {_FURTHEST:.0e}")


def _messages(device: torch.device, here: int) -> dict[str, str]:
    """Returns the time of each kind of message between the two ranks."""
    data, other = torch.ones(_ELEMENTS, dtype=torch.bfloat16, device=device), 1 - here
    inbox, words = torch.empty_like(data), torch.zeros(_WORDS, dtype=torch.int64)
    short, gathered = torch.zeros(4, dtype=torch.int64), [torch.empty(4, dtype=torch.int64) for _ in range(2)]
    wide = data.float() if device.type == "cpu" else data  # gloo adds slowly in 16 bits, and dmuon does not let it

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, data, other), dist.P2POp(dist.irecv, inbox, other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    calls: dict[str, tuple[Callable[[], Any], Tensor]] = {
        "broadcast": (lambda: dist.broadcast(data, 0), data),
        "reduce": (lambda: dist.reduce(wide, 0), wide),
        "send and receive": (exchange, data),
        "host all-reduce": (lambda: dist.all_reduce(words, dist.ReduceOp.MAX), words),
        "host all-gather": (lambda: dist.all_gather(gathered, short), short),
    }
    if device.type != "cpu":  # there dmuon sends equal parts of a unit so
        both = torch.zeros(2 * _ELEMENTS, dtype=data.dtype, device=device)
        calls["all-gather"] = (lambda: dist.all_gather_into_tensor(both, data), data)
        calls["reduce-scatter"] = (lambda: dist.reduce_scatter_tensor(inbox, both), data)
    return {name: _time(call, tensor, device) for name, (call, tensor) in calls.items()}


def _time(call: Callable[[], Any], tensor: Tensor, device: torch.device) -> str:
    module, seconds = torch.get_device_module(device), []
    for _ in range(_TIMES):
        dist.barrier()
        module.synchronize(device)
        begin = time.perf_counter()
        call()
        module.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    took, size = statistics.median(seconds[2:]), tensor.nbytes
    rate = f", {size / took / 1e9:.2f} GB/s" if size > 1 << 20 else ""
    return f"{size / 2**20:.0f} MiB: {1e3 * took:.2f} ms{rate}" if rate else f"{size} bytes: {1e6 * took:.0f} us"
