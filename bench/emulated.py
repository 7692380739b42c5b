"""The ranks that torchrun has started, on the asynchronous device of the tests (tests/async_device)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/async_device"))


def open_fake_device() -> None:
    """Lets torch's `fake` backend answer on the asynchronous device. The missing ranks' messages are NaN there."""
    importlib.import_module("async_device").configure(races="off")
    dist.Backend.backend_capability["fake"].append("emulated")


@contextmanager
def emulated_mesh(extents: str) -> Iterator[DeviceMesh]:
    """A mesh of nodes x ranks a node, "2x2" say, of all ranks."""
    importlib.import_module("async_device")  # which registers the device
    dist.init_process_group("cpu:gloo,emulated:emulated")
    torch.get_device_module("emulated").set_device(dist.get_rank())
    shape = tuple(int(extent) for extent in extents.split("x"))
    yield init_device_mesh("emulated", shape, mesh_dim_names=("replicate", "shard"))
    dist.barrier(device_ids=[dist.get_rank()])
    dist.destroy_process_group()
