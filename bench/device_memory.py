"""Memory of an accelerator at the peak of a step: dmuon.Muon, its plan, and AdamW under FSDP2.

The allocator of the asynchronous device of the tests (tests/async_device) counts: `make bench-memory`. The model is a
GPT on so few tokens that activations are next to nothing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

import dmuon

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.emulated import emulated_mesh
from bench.gpt import BYTES, GPT, GPTConfig

KINDS = ("adamw", "dmuon")
PHASES = ("forward", "backward", "step")
NUM_TOKENS = 16
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def count(mesh: Any, kind: str, dtype: str, num_blocks: int, width: int, **options: Any) -> dict[str, int]:
    """Returns the peak bytes of the third step, by phase, above the level before the model; and the plan's figure.

    Args:
        mesh: of the asynchronous device.
        kind: of KINDS.
        dtype: of POLICIES.
        num_blocks: of the model.
        width: of the model.
        **options: of `dedicate_params`.
    """
    async_device = importlib.import_module("async_device")
    device = torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
    async_device.configure(races="off")
    before, policy = torch.get_device_module(device).memory_allocated(), POLICIES[dtype]
    torch.manual_seed(0)
    model = GPT(GPTConfig(num_blocks, width, num_heads=width // 64, sequence=NUM_TOKENS)).to(device)
    if kind == "dmuon":
        dmuon.dedicate_params(model, mesh, mp_policy=policy, costs="modelled", **options)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    # In bfloat16 the emulated iteration is fast, and as large as in the float16 of accelerators.
    optimizer: Any = dmuon.Muon(model, ns_dtype=torch.bfloat16) if kind == "dmuon" else None
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), foreach=True)
    found = {}
    for _ in range(3):
        tokens = torch.randint(0, BYTES, (1, NUM_TOKENS), device=device)
        torch.accelerator.synchronize()
        async_device.reset_statistics()
        with async_device.phase("forward"), sdpa_kernel(SDPBackend.MATH):
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        with async_device.phase("backward"):
            loss.backward()
        del loss
        with async_device.phase("step"):
            optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        counts = async_device.statistics()
        found = {phase: counts[phase]["peak_bytes"] - before for phase in PHASES}
    if kind == "dmuon":
        found["plan"] = optimizer.plan.memory_bytes[dist.get_rank()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x2", help="nodes x ranks a node")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dtypes", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)}")
    arguments = parser.parse_args()
    with emulated_mesh(arguments.mesh) as mesh:
        for dtype in arguments.dtypes.split(","):
            for kind in KINDS:
                found = count(mesh, kind, dtype, arguments.blocks, arguments.width)
                everyone: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, found)
                if dist.get_rank() == 0:
                    fullest = max(everyone, key=lambda one: max(one[phase] for phase in PHASES))
                    cells = "  ".join(f"{name} {size / 1e6:7.1f}" for name, size in fullest.items())
                    print(f"{arguments.mesh} {dtype:8} {kind:5}  {cells}  MB, of the fullest rank", flush=True)


if __name__ == "__main__":
    main()
