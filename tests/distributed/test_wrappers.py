"""What trainers put around a model and its optimizer: dmuon sees the model inside, or refuses by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from models import batch, make_gpt
from refusals import REFUSED, Refusals, expect_refusal, ready
from scenario import Session, check, language_loss
from torch.distributed._composable import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.nn.parallel import DistributedDataParallel
from training import AHEAD, LR, WEIGHT_DECAY, dedicate, shard

import dmuon

refused = Refusals()


class _FabricModule(nn.Module):
    """As Lightning Fabric's: both are children, and what it does not have is the original's."""

    def __init__(self, forward_module: nn.Module, original_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original_module

    def forward(self, *args: Any) -> Any:
        return self._forward_module(*args)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_original_module"), name)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


WRAPPERS = {
    "fabric": lambda model: _FabricModule(model, model),
    "compiled": compiled,
    "fabric, compiled inside": lambda model: _FabricModule(compiled(model), model),
    "compiled, fabric inside": lambda model: compiled(_FabricModule(model, model)),
}


def wrapped(s: Session, wrapper: str, early: bool) -> None:
    """`early`: dedicate_params gets the wrapper too. Its functions do from then on."""
    model = make_gpt(depth=2)
    if s.reference:
        s.start(model)
    else:
        s.initial = {name: p.detach().clone() for name, p in model.named_parameters()}
        s.model = model
        outer = WRAPPERS[wrapper](model) if early else model
        dedicate(outer, s.mesh, s.schedule)
        shard(model, s.mesh)
        outer = outer if early else WRAPPERS[wrapper](model)
        s.opt = dmuon.Muon(outer, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
        s.opt.load_state_dict(s.opt.state_dict())  # as Accelerate's wrapper of optimizers does before the first step
        s.model = outer
    for step in range(2):
        s.backward(language_loss(step, s.size))
        s.clip(0.2)
        s.step()
    if not s.reference:
        s.notes.append(len(dmuon.routing_table(s.model)) == len(list(model.parameters())))
        s.model = model


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("wrapper", ["fabric", "compiled", "fabric, compiled inside", "compiled, fabric inside"])
def test_a_wrapped_model_trains_as_the_one_inside(ranks, wrapper, early):
    *notes, expected = check(ranks, wrapped, schedule=AHEAD, wrapper=wrapper, early=early)
    for note in notes:
        assert note[-1] and note[:-1] == pytest.approx(expected, rel=1e-4)


class AcceleratedOptimizer:
    """As Accelerate's: no Muon, and holds one."""

    def __init__(self, optimizer: dmuon.Muon) -> None:
        self.optimizer = optimizer


def verified(mesh: Any) -> bool:
    model, opt = ready(mesh)
    return dmuon.verify(_FabricModule(model, model), AcceleratedOptimizer(opt)).ok  # type: ignore[arg-type]


def test_verify_finds_the_model_and_the_optimizer_in_their_wrappers(ranks):
    assert ranks.run(verified, (2, 2)) == [True] * 4


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


REPLICAS = {
    "plain": ddp,
    "in fabric": lambda model: _FabricModule(ddp(model), model),
    "compiled": lambda model: compiled(ddp(model)),
    "inside": lambda model: nn.Sequential(ddp(model)),
}


@refused("dedicate_params: model: expected a plain module", "got DistributedDataParallel", around="plain")
@refused("dedicate_params: model: expected a plain module", "got DistributedDataParallel", around="in fabric")
@refused("dedicate_params: model: expected a plain module", "got DistributedDataParallel", around="compiled")
@refused("got DistributedDataParallel at '0'", "replicated=True", around="inside")
def dedicate_a_replica(mesh: Any, around: str) -> None:
    dmuon.dedicate_params(REPLICAS[around](make_gpt(depth=1)), mesh)


@refused("Muon: model: expected a plain module", "got DistributedDataParallel", "the model without it")
def muon_of_a_replica(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dedicate(model, mesh, AHEAD)
    dmuon.Muon(ddp(model))


@refused("DistributedDataParallel would copy it. Expected: the model without it")
def replica_of_a_trained_model(mesh: Any) -> None:
    ddp(ready(mesh, fsdp=False)[0])


@refused("aten.view.default on", "DistributedDataParallel would copy it. Expected: the model without it", before=True)
@refused("aten.view.default on", "DistributedDataParallel would copy it. Expected: the model without it", before=False)
def replicate_of_old(mesh: Any, before: bool) -> None:
    """Which acts in its first forward."""
    model = make_gpt(depth=1)
    if before:
        replicate_by_ddp(model)
    dedicate(model, mesh, AHEAD)
    if not before:
        replicate_by_ddp(model)
    dmuon.Muon(model)
    model(batch(0))


@refused("is sharded by [Replicate()", "by fully_shard on the same mesh", before=True)
@refused("is whole on every rank", "was this module given to replicate()?", "fully_shard", before=False)
def replicate_beside_fully_shard(mesh: Any, before: bool) -> None:
    model, flat = make_gpt(depth=1).to(mesh.device_type), dist.init_device_mesh(mesh.device_type, (4,))
    if before:
        replicate_by_fsdp(model, mesh=flat)
    dedicate(model, flat, AHEAD)
    if not before:
        replicate_by_fsdp(model, mesh=flat)
    dmuon.Muon(model)


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
