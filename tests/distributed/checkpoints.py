"""Models, their training by dmuon and by torch's own optimizers, and their whole state, for what saves and loads it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dsd
import torch.nn as nn
from models import Gpt, Heads, Matrices, batch, experts_gpt, heads_gpt, loss_of, make_gpt, part
from torch.distributed.fsdp import fully_shard
from training import AHEAD, dedicate, place_of, shard

import dmuon


def tied_gpt() -> Gpt:
    model = make_gpt(depth=3)
    model.blocks[2].up = model.blocks[0].up
    return model


def frozen_gpt() -> Gpt:
    model = make_gpt(depth=3)
    model.blocks[1].requires_grad_(False)
    return model


def thin() -> nn.Module:
    torch.manual_seed(3)
    return Matrices([6, 1, 3, 2, 9])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: make_gpt(depth=2),
    "tied": tied_gpt,
    "frozen": frozen_gpt,
    "bf16": lambda: make_gpt(depth=2).bfloat16(),
    "thin": thin,
    "heads": heads_gpt,
    "experts": experts_gpt,
    "bf16 experts": lambda: experts_gpt().bfloat16(),
}


def sharded(mesh: Any, model: nn.Module, tied: bool) -> nn.Module:
    """By block; as a whole where blocks share parameters, which fully_shard would refuse."""
    if mesh is None:
        return model
    if not tied:
        shard(model, mesh)
        return model
    return fully_shard(model, mesh=mesh)


def started(
    mesh: Any, model: nn.Module, schedule: dict[str, Any] = AHEAD, tied: bool = False, **muon: Any
) -> tuple[Any, Any]:
    """`muon`: more options of dmuon.Muon."""
    if any(isinstance(module, Heads) for module in model.modules()) and "plan" not in schedule:
        schedule = {"strategy": "round_robin", **schedule}  # heads of a projection, and experts, get several owners
    dedicate(model, mesh, schedule)
    sharded(mesh, model, tied)
    return model, dmuon.Muon(model, lr=0.02, ns_coefficients="quintic", ns_dtype=torch.float32, **muon)


def loss(mesh: Any, model: nn.Module, step: int) -> torch.Tensor:
    rank, size = place_of(mesh)
    if isinstance(model, Matrices):
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        return model(x).square().mean()
    return loss_of(model, part(batch(step), rank, size))


def train(mesh: Any, model: nn.Module, opt: Any, steps: range) -> None:
    for step in steps:
        loss(mesh, model, step).backward()
        opt.step()
        opt.zero_grad()


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]


def trained_by_torch(mesh: Any, steps: int, model: str = "gpt") -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Stock FSDP2 with torch's own optimizers, which know no heads; `mesh` None: one process."""
    module = MODELS[model]()
    if mesh is not None:
        shard(module, mesh)
    owned = matrices_of(module)
    rest = [p for p in module.parameters() if all(p is not matrix for matrix in owned)]
    opts = [torch.optim.Muon(owned, lr=0.02), torch.optim.AdamW(rest, lr=3e-4, betas=(0.9, 0.95), fused=True)]
    for step in range(steps):
        loss(mesh, module, step).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return module, opts


def full_state(model: nn.Module, opt: Any) -> dict[str, Any]:
    weights, state = dsd.get_state_dict(model, opt, options=dsd.StateDictOptions(full_state_dict=True))
    return copy.deepcopy({"model": weights, "optimizer": state})


def tensors_of(state: Any, path: str = "") -> dict[str, Any]:
    """Every tensor and number of nested dicts, by its path; of groups, what decides how training goes on."""
    if isinstance(state, dict):
        parts = [tensors_of(value, f"{path}.{key}") for key, value in state.items() if key != "param_groups"]
        return {key: value for part in parts for key, value in part.items()}
    return {path: state}


def unlike(a: Any, b: Any) -> list[str]:
    a, b = tensors_of(a), tensors_of(b)
    same = {key for key in a.keys() & b.keys() if torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key]))}
    return sorted((a.keys() | b.keys()) - same)


def assert_near(got: dict[str, Any], expected: dict[str, Any], initial: dict[str, Any]) -> None:
    """Whole states, by 0.1 % of the way."""
    for kind in ("model", "optimizer"):
        a, b, begin = (tensors_of(state[kind]) for state in (got, expected, initial))
        for name, value in b.items():
            moved = float(torch.as_tensor(value - begin[name], dtype=torch.float64).norm())
            error = float(torch.as_tensor(a[name] - value, dtype=torch.float64).norm())
            assert error <= 1e-3 * moved, (name, error, moved)


def group_of(mesh: Any) -> dict[str, Any]:
    """For torch.distributed.checkpoint, as the world has ranks that a small mesh does not."""
    if mesh.size() == 1:
        return {"no_dist": True}
    return {"process_group": mesh.get_group(mesh.ndim - 1)} if mesh.size() < dist.get_world_size() else {}


def dicts_of(model: nn.Module, opt: Any) -> dict[str, Any]:
    weights, state = dsd.get_state_dict(model, opt)
    return {"model": weights, "optimizer": state}
