"""Compares a state dict with one scatter of its bytes, and a checkpoint with stock FSDP2's with AdamW.

    torchrun --nproc-per-node 4 bench/checkpoint.py --mesh 2x2

The scatter is the floor. Every rank sends each byte that it owns once. On 1-D meshes it cuts its matrices into a part
for each rank. On 2-D meshes it cuts them for the ranks of its node, which send them on to the other nodes. It is one
exchange without names, pieces or copies, into new memory.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import dmuon
from bench.contender import Cluster, open_cluster
from bench.interleave import orders, paired_ratio
from bench.provenance import provenance


def build(width: int, layers: int, cluster: Cluster, owned: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(cluster.device)
    if owned:
        dmuon.dedicate_params(model, cluster.mesh, costs="modelled")
    for module in [*blocks, model]:
        fully_shard(module, mesh=cluster.mesh)
    optimizer: torch.optim.Optimizer = dmuon.Muon(model) if owned else torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(8, width, device=cluster.device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def floor(model: nn.Module, cluster: Cluster) -> Callable[[], list[torch.Tensor]]:
    """One exchange of as many bytes as the matrices have, as their owners hold them."""
    assert cluster.mesh is not None
    per_owner = [0] * cluster.num_ranks
    for route in dmuon.routing_table(model):
        if isinstance(route.owner, int):  # the bench's model has no stacks to divide
            per_owner[route.owner] += math.prod(route.shape)
    groups = [cluster.mesh.get_group(dim) for dim in range(cluster.mesh.ndim)]
    row, node = groups[-1], 0 if len(groups) == 1 else dist.get_rank(groups[0])
    members = dist.get_world_size(row)
    parts = [
        [per_owner[first + member] // members for member in range(members)]
        for first in range(0, cluster.num_ranks, members)
    ]
    sent = torch.randn(members * parts[node][dist.get_rank(row)], device=cluster.device)

    def scatter() -> list[torch.Tensor]:
        received = [torch.empty(sum(sizes), device=cluster.device) for sizes in parts]  # by node
        dist.all_to_all_single(received[node], sent, parts[node], [sent.numel() // members] * members, group=row)
        for source, tensor in enumerate(received if len(groups) == 2 else []):
            dist.broadcast(tensor, group=groups[0], group_src=source)
        return received

    return scatter


def local_bytes(state: Any) -> int:
    """Returns the bytes of all shards of matrices in a state dict."""
    if isinstance(state, dict):
        return sum(local_bytes(value) for value in state.values())
    return state.to_local().nbytes if isinstance(state, DTensor) and state.ndim == 2 else 0


def timed(action: Callable[[], Any]) -> float:
    dist.barrier()
    begun = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begun


def checkpoint(model: nn.Module, optimizer: Any, folder: Path, load: bool) -> None:
    weights, state = get_state_dict(model, optimizer)
    if load:
        dcp_load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        dcp_save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cluster = open_cluster(arguments.mesh)
    ours, stock = (build(arguments.width, arguments.layers, cluster, owned) for owned in (True, False))
    folders = [Path(tempfile.gettempdir()) / f"dmuon-checkpoint-{name}" for name in ("ours", "stock")]
    actions: dict[str, Callable[[], Any]] = {
        "one scatter of the matrices": floor(ours[0], cluster),
        "model.state_dict()": ours[0].state_dict,
        "optimizer.state_dict()": ours[1].state_dict,
        "save, dmuon": lambda: checkpoint(*ours, folders[0], load=False),
        "save, FSDP2 and AdamW": lambda: checkpoint(*stock, folders[1], load=False),
        "load, dmuon": lambda: checkpoint(*ours, folders[0], load=True),
        "load, FSDP2 and AdamW": lambda: checkpoint(*stock, folders[1], load=True),
    }
    for action in actions.values():
        action()
    times: dict[str, list[float]] = {name: [] for name in actions}
    for order in orders(list(actions), arguments.rounds):
        for name in order:
            times[name].append(timed(actions[name]))
    before = ours[1].stats()  # type: ignore[attr-defined]
    weights = ours[0].state_dict()
    after = ours[1].stats()  # type: ignore[attr-defined]
    moved = torch.tensor([after[key] - before[key] for key in ("bytes_sent_intra", "bytes_sent_inter")])
    dist.all_reduce(moved)
    shards = local_bytes(weights) + local_bytes(ours[1].state_dict())
    elements = sum(value.numel() for value in weights.values() if value.ndim == 2)
    if cluster.rank == 0:
        for name, value in provenance().items():
            print(f"{name}: {value}")
        bases = {"model": "one scatter of the matrices", "optim": "one scatter of the matrices"}
        bases |= {"save,": "save, FSDP2 and AdamW", "load,": "load, FSDP2 and AdamW"}
        for name, values in times.items():
            base = bases.get(name[:5], name)
            print(f"{name:28} {1e3 * statistics.median(values):8.1f} ms  {paired_ratio(values, times[base])} x {base}")
        print(
            f"matrices {4e-6 * elements:.1f} MB; sent inside nodes {1e-6 * float(moved[0]):.1f} MB, between nodes "
            f"{1e-6 * float(moved[1]):.1f} MB"
        )
        print(f"shards of weights and momentum on rank 0: {shards / elements:.3f} bytes an element")
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
