"""What a plan says of memory is what an accelerator's allocator counts at the peak of a step.

On the asynchronous device, of models of nothing but matrices, on one row of tokens: beside the engine and the update
there are but activations of 512 bytes a matrix, and the gradient that autograd has made last. Nothing is subtracted.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

import dmuon
from dmuon import _C, _plan

pytestmark = pytest.mark.xdist_group("async_device")  # one process has the ranks

WIDTH = 128
UNITS = (7, 4, 8, 5, 8, 6)  # matrices of each
PHASES = ("forward", "backward", "step")


class Stack(nn.Module):
    """Four experts, or, divided over the ranks of a node, this rank's; without an exchange of tokens."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(experts, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.flatten(0, 1)).unflatten(-1, (-1, WIDTH)).sum(-2)


def live_bytes() -> int:
    gc.collect()  # what an earlier case left must not be freed while this one is measured
    torch.accelerator.synchronize()
    return int(torch.emulated.memory_allocated())


def experts_by_view(name: str, module: nn.Module, parameter: nn.Parameter) -> dmuon.View | None:
    return dmuon.views.experts(parameter) if isinstance(module, Stack) else None


def trained(
    mesh: Any, dtype: torch.dtype, divided: bool = False, held: bool = False, **options: Any
) -> tuple[int, int]:
    """Most bytes of the third step, beyond those before the model; and those of the plan for this rank.

    With `held` the first step has a backward under no_sync too.
    """
    import async_device

    async_device.reset()
    async_device.configure(races="off")
    before = live_bytes()
    with torch.device("emulated"):
        units = [[nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(size)] for size in UNITS]
        if divided:
            node = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[1]]
            units = [[*unit, Stack(4 // node.size())] for unit in units[:3]]
    model = nn.Sequential(*(nn.Sequential(*unit) for unit in units))
    for unit in model if divided else ():
        local = unit[-1].weight.detach()
        unit[-1].weight = nn.Parameter(DTensor.from_local(local, node, [Shard(0)], run_check=False))
        del local
    del units
    dmuon.dedicate_params(model, mesh, costs="modelled", select=experts_by_view, **options)
    optimizer = dmuon.Muon(model, ns_dtype=torch.bfloat16)  # in which the emulated iteration is fast
    most = 0
    x = torch.ones(1, WIDTH, dtype=dtype, device="emulated")
    if held:
        with dmuon.no_sync(model):
            model(x).sum().backward()
    for _ in range(3):
        async_device.reset_statistics()
        with async_device.phase("forward"):
            loss = model(x).sum()
        with async_device.phase("backward"):
            loss.backward()
        with async_device.phase("step"):
            optimizer.step()
        optimizer.zero_grad()
        torch.accelerator.synchronize()
        counts = async_device.statistics()
        most = max(counts[phase]["peak_bytes"] for phase in PHASES) - before
    return most, optimizer.plan.memory_bytes[mesh.get_rank()]


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"lookahead": 0},
        {"lookahead": 1},
        {"lookahead": 2},
        {"lookahead": 3},
        {"dtype": torch.bfloat16},
        {"node_copy": False},
        {"max_units_in_flight": 2},
        {"reshard_after_forward": False},
        {"strategy": "rank0"},
        {"divided": True},
        {"held": True},
    ],
    ids=str,
)
def test_the_plan_says_what_the_allocator_counts(device_ranks, mesh, options):
    options = {"dtype": torch.float32, **options}
    for rank, (counted, planned) in enumerate(device_ranks.run(trained, mesh, **options)):
        assert counted == pytest.approx(planned, rel=0.05), f"rank {rank}"


STEPS = [(3.4445, -4.7750, 2.0315)] * 5
BATCHES = [
    ((batch, *shape), dtype)
    for shape in ((128, 128), (64, 256), (256, 64), (96, 80))
    for batch in (1, 3)
    for dtype in (torch.float16, torch.float32)
]


def updated(mesh: Any) -> list[int]:
    """Bytes that the update of each batch takes at most, beside master, momentum and gradient."""
    import async_device

    found, applies = [], torch.ones((), dtype=torch.bool, device="emulated")
    for sizes, dtype in BATCHES:
        tensors = [torch.rand(sizes, device="emulated") for _ in range(3)]
        group = _C.MuonGroup(0.1, 0.1, 0.9, True, STEPS, 1e-7, "original", dtype)
        before = live_bytes()
        async_device.reset_statistics()
        _C.muon_update(*tensors, group, applies)
        torch.accelerator.synchronize()
        found.append(max(counts["peak_bytes"] for counts in async_device.statistics().values()) - before)
    return found


def planned_update(sizes: tuple[int, int, int], dtype: torch.dtype) -> int:
    """What a plan reckons for a batch on a single rank, on which nothing travels ahead of an update."""
    batch, rows, cols = sizes
    options = _plan.PlanOptions()
    options.lookahead, options.ns_bytes = 0, dtype.itemsize
    costs = _plan.CostTable("by hand", [((1, rows, cols), [(1, 10), (batch, 1)] if batch > 1 else [(1, 10)])])
    items = [_plan.Parameter(f"{index}", rows, cols, 0) for index in range(batch)]
    plan = _plan.make_plan(items, _plan.Mesh(1, 1), "load_balance", costs, options)
    assert len(plan.batches) == 1
    return plan.memory[0].update


def test_an_update_takes_what_the_plan_says(device_ranks):
    for (sizes, dtype), counted in zip(BATCHES, device_ranks.run(updated, (1,))[0], strict=True):
        # Norms and identities are small beside matrices.
        assert counted == pytest.approx(planned_update(sizes, dtype), rel=0.02, abs=0), f"{sizes}, {dtype}"
