"""Worker processes that stay alive over many multi-rank test cases, forked from one that has imported everything.

So they also share its hash seed and addresses. What must not depend on these, such as the order of collectives, is
tested by test_cluster, whose ranks are programs of their own, as under torchrun.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

HERE = str(Path(__file__).parent)


class RankFailed(AssertionError):
    """A case raised on some rank; the message holds every rank's traceback."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """The first ranks of the world in this shape; every rank of the world takes part in making it."""
    names = ("replicate", "shard", "extra")[: len(shape)] if len(shape) > 1 else ("shard",)
    table = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return DeviceMesh("cpu", table, mesh_dim_names=names)


def _work(rank: int, size: int, port: int, connection: Any, timeout_s: float) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    sys.path.insert(0, HERE)
    gc.freeze()  # what was imported is not looked through again by each collection
    torch.set_num_threads(1)
    os.nice(10)  # test_faults, which may run beside, watches the clock
    with contextlib.suppress(OSError):  # only saves time
        # No rank interrupts another: gloo's threads spin on locks whose holder was interrupted.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    while True:
        task = connection.recv()
        if task is None:
            break
        module, function, shape, kwargs, defaults = task
        try:
            importlib.import_module("dmuon").dedicate_params.__kwdefaults__.update(defaults)
            if shape not in meshes:
                meshes[shape] = make_mesh(shape)
            if rank >= torch.Size(shape).numel():
                connection.send(("outside", None))
                continue
            result = getattr(importlib.import_module(module), function)(meshes[shape], **kwargs)
            connection.send(("ok", result))
        except Exception:
            connection.send(("error", traceback.format_exc()))
    dist.destroy_process_group()


class RankPool:
    """`size` processes on gloo; `run` calls one function on all ranks of a mesh and returns their results."""

    def __init__(self, size: int = 4, timeout_s: float = 40) -> None:
        self._size = size
        self._timeout_s = timeout_s
        self._workers: list[tuple[Any, Any]] = []
        self.defaults: dict[str, Any] = {}  # of dedicate_params, for what a case leaves open

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "dmuon"])
        port = free_port()
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self._size, port, theirs, self._timeout_s), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, function: Any, mesh: tuple[int, ...], may_die: tuple[int, ...] = (), **kwargs: Any) -> list[Any]:
        """The result of each rank of the mesh; `function(mesh, **kwargs)` must be importable by its module's name.

        Args:
            function: what to call.
            mesh: its shape.
            may_die: ranks that may exit without an answer.
            **kwargs: of the function.

        Raises:
            RankFailed: if any rank raised or did not answer; the processes are then replaced.
        """
        if not self._workers:
            self._start()
        for _, connection in self._workers:
            connection.send((function.__module__, function.__name__, mesh, kwargs, self.defaults))
        results, errors = [], []
        deadline = time.monotonic() + self._timeout_s + 60
        for rank, (_, connection) in enumerate(self._workers):
            try:
                answered = connection.poll(max(0.0, deadline - time.monotonic()))
                kind, value = connection.recv() if answered else ("error", "no answer in time")
            except (EOFError, ConnectionResetError):
                if rank in may_die:
                    continue
                kind, value = "error", "the process died"
            if kind == "error":
                errors.append(f"--- rank {rank} ---\n{value}")
            elif kind == "ok":
                results.append(value)
        if errors:
            self.close()
            raise RankFailed("\n".join(errors))
        return results

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []
