"""Runs a program as `python PROGRAM ...` does, with Muon's iteration in fp32 wherever it names no dtype.

By default a CPU that multiplies bf16 iterates in it: too coarse to compare weights with another program's. And where
RECIPE_NODES in the environment is not 1, a model on one mesh of all ranks is sharded inside that many groups of them
and replicated between these, on a mesh of two dimensions.
"""

import functools
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dmuon

NODES = int(os.environ.get("RECIPE_NODES", "1"))


@functools.cache
def over_nodes(mesh: DeviceMesh) -> DeviceMesh:
    shape = (NODES, mesh.size() // NODES)
    return init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))


def on_nodes(shards: Callable[..., Any]) -> Callable[..., Any]:
    """`shards(module, mesh)`, with the mesh of two dimensions where the program's has one and all ranks."""

    @functools.wraps(shards)
    def sharded(module: Any, mesh: Any = None, **options: Any) -> Any:
        whole = mesh.ndim == 1 and mesh.size() == torch.distributed.get_world_size()
        return shards(module, mesh=over_nodes(mesh) if whole else mesh, **options)

    return sharded


if __name__ == "__main__":
    dmuon.Muon = functools.partial(dmuon.Muon, ns_dtype=torch.float32)  # type: ignore[assignment,misc]
    if NODES > 1:
        dmuon.dedicate_params = on_nodes(dmuon.dedicate_params)
        torch.distributed.fsdp.fully_shard = on_nodes(torch.distributed.fsdp.fully_shard)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
