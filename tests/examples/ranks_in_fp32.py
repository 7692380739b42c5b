"""Runs a program on ranks, as torchrun does, with Muon's iteration in fp32 wherever the program names no dtype.

    python ranks_in_fp32.py NUM_RANKS NUM_NODES PROGRAM ...

By default a CPU that multiplies bf16 iterates in it: too coarse to compare weights with another program's. Costs are
modelled: to measure them takes seconds, and changes no weight. And where NUM_NODES is not 1, a model on one mesh of all
ranks is sharded inside that many groups of them and replicated between these, on a mesh of two dimensions.

What takes most of a small program's time is done once: the ranks are forked from a process that has imported what the
program imports. This is safe because that process has no second thread.
"""

import ast
import contextlib
import functools
import importlib
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what the first step would import
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon

HOST = "127.0.0.1"


@functools.cache
def over_nodes(mesh: DeviceMesh, num_nodes: int) -> DeviceMesh:
    shape = (num_nodes, mesh.size() // num_nodes)
    return init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))


def on_nodes(shards: Callable[..., Any], num_nodes: int) -> Callable[..., Any]:
    """`shards(module, mesh)`, with the mesh of two dimensions where the program's has one and all ranks."""

    @functools.wraps(shards)
    def sharded(module: Any, mesh: Any = None, **options: Any) -> Any:
        if mesh is None:  # all ranks, as Accelerate shards
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = mesh.ndim == 1 and mesh.size() == dist.get_world_size()
        return shards(module, mesh=over_nodes(mesh, num_nodes) if whole else mesh, **options)

    return sharded


def import_as(program: str) -> None:
    """What the program imports at its top, and of modules that import their parts late those that it names."""
    for statement in ast.parse(Path(program).read_text()).body:
        for alias in statement.names if isinstance(statement, ast.Import) else ():
            importlib.import_module(alias.name)
        if isinstance(statement, ast.ImportFrom) and statement.module:
            for alias in statement.names:
                getattr(importlib.import_module(statement.module), alias.name, None)


def play(rank: int, num_ranks: int, port: int) -> int:
    """The program on one rank; its exit status."""
    place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def launch(num_ranks: int) -> int:
    """Forks the ranks, which meet at a store that this process keeps; 1 as soon as one has failed, else 0."""
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1
    tells, told = os.pipe()
    ranks = {}
    for rank in range(num_ranks):
        ranks[pid := os.fork()] = rank
        if pid == 0:
            os._exit(play(rank, num_ranks, port=int.from_bytes(os.read(tells, 2))))
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    os.write(told, store.port.to_bytes(2) * num_ranks)
    while ranks:
        pid, status = os.wait()
        del ranks[pid]
        if status != 0:
            for other in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    num_ranks, num_nodes = int(sys.argv[1]), int(sys.argv[2])
    del sys.argv[:3]
    import_as(sys.argv[0])
    dmuon.Muon = functools.partial(dmuon.Muon, ns_dtype=torch.float32)  # type: ignore[assignment,misc]
    dmuon.dedicate_params = functools.partial(dmuon.dedicate_params, costs="modelled")  # type: ignore[assignment]
    dmuon.prepare = functools.partial(dmuon.prepare, ns_dtype=torch.float32, costs="modelled")
    if num_nodes > 1:
        dmuon.dedicate_params = on_nodes(dmuon.dedicate_params, num_nodes)
        torch.distributed.fsdp.fully_shard = on_nodes(torch.distributed.fsdp.fully_shard, num_nodes)
    sys.exit(launch(num_ranks))
