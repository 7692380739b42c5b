"""What between dedicate_params and Muon would go wrong raises ValueError on every rank and says what to do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import batch, make_gpt
from refusals import REFUSED, Refusals, dedicated, expect_refusal, rank_of
from training import shard

import dmuon

refused = Refusals()


@refused("between dedicate_params and Muon", fsdp=False)
@refused("between dedicate_params and Muon", fsdp=True)
def forward_between(mesh: Any, fsdp: bool) -> None:
    model = dedicated(mesh)
    if fsdp:
        shard(model, mesh)
    model(batch(0))


@refused("between dedicate_params and Muon")
def forward_of_a_submodule_between(mesh: Any) -> None:
    model = dedicated(mesh)
    model.blocks[0].up(torch.zeros(1, 24))


@refused("'blocks.0.up.weight' or its module was replaced")
def weight_assigned_between(mesh: Any) -> None:
    model = dedicated(mesh)
    model.blocks[0].up.weight = nn.Parameter(torch.ones(41, 24))
    dmuon.Muon(model)


@refused("'blocks.0.up.adapter.weight' was added after dedicate_params")
def matrix_added_between(mesh: Any) -> None:
    model = dedicated(mesh)
    model.blocks[0].up.adapter = nn.Linear(4, 4)
    shard(model, mesh)
    dmuon.Muon(model)


@refused("cast the model before dedicate_params", fsdp=False)
@refused("cast the model before dedicate_params", fsdp=True)
def cast_between(mesh: Any, fsdp: bool) -> None:
    model = dedicated(mesh)
    if fsdp:
        shard(model, mesh)
    model.double()
    dmuon.Muon(model)


@refused("a state dict was taken or loaded between", "load weights before dedicate_params", strict=True)
@refused("a state dict was taken or loaded between", "load weights before dedicate_params", strict=False)
def load_between(mesh: Any, strict: bool) -> None:
    model = make_gpt(depth=1)
    saved = copy.deepcopy(model.state_dict())
    dmuon.dedicate_params(model, mesh)
    model.load_state_dict(saved, strict=strict)


@refused("a state dict was taken or loaded between", "Under Accelerate: accelerator.prepare, then dmuon.prepare")
def save_between(mesh: Any) -> None:
    model = dedicated(mesh)
    model.state_dict()


@refused("the model was pickled between dedicate_params and Muon", "after Muon its state_dict()")
def pickled_between(mesh: Any) -> None:
    pickle.dumps(dedicated(mesh))


BETWEEN = "between dedicate_params and Muon no module holds its matrices"


@refused("on 'blocks.0.up.weight'", BETWEEN, "before dedicate_params; or load after Muon", how="reset_parameters")
@refused("on 'blocks.0.up.weight'", BETWEEN, "then model.to_empty(device=...)", how="nn.init")
@refused("on 'blocks.0.up.weight'", BETWEEN, how="data")
@refused("on 'blocks.0.up.weight'", BETWEEN, how="copy_")
@refused("on 'blocks.0.up.weight'", BETWEEN, how="index")
@refused("on 'blocks.0.up.weight'", BETWEEN, how="requires_grad_")
@refused("setting .requires_grad on 'blocks.0.up.weight'", BETWEEN, how="requires_grad =")
@refused("setting .data on 'blocks.0.up.weight'", BETWEEN, how="data =")
@refused("on 'blocks.0.up.weight'", BETWEEN, how="read")
@refused("on 'blocks.0.up.weight'", BETWEEN, how="read on meta")
def touch_between(mesh: Any, how: str) -> None:
    with torch.device("meta" if "meta" in how else mesh.device_type):
        model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    assert model.blocks[0].up.weight.shape == (41, 24) and model.blocks[0].up.weight.dtype == torch.float32
    up = model.blocks[0].up
    assert up.weight.requires_grad
    if how == "reset_parameters":
        up.reset_parameters()
    elif how == "requires_grad =":
        up.weight.requires_grad = False
    elif how == "data =":
        up.weight.data = torch.ones(41, 24)
    elif how == "nn.init":
        nn.init.trunc_normal_(up.weight)
    elif how == "data":
        up.weight.data.normal_()
    elif how == "copy_":
        with torch.no_grad():
            up.weight.copy_(torch.ones(41, 24))
    elif how == "index":
        with torch.no_grad():
            up.weight[3] = 0
    elif how == "requires_grad_":
        up.weight.requires_grad_(False)
    else:
        up.weight.norm()


@refused("requires_grad_(False) between", "would not reach 'blocks.0.", "freeze before dedicate_params, or after Muon")
def freeze_a_block_between(mesh: Any) -> None:
    model = dedicated(mesh)
    model.blocks[0].requires_grad_(True)
    model.blocks[0].requires_grad_(False)


@refused("Muon: model: 'blocks.0.up.weight' was frozen", "unfreeze it before dedicate_params", fsdp=True)
@refused("Muon: model: 'blocks.0.up.weight' was frozen", "unfreeze it before dedicate_params", fsdp=False)
@refused("Muon: model: 'blocks.0.up.weight' was frozen", "unfreeze it before dedicate_params", fsdp=True, only_on=1)
def unfrozen_between(mesh: Any, fsdp: bool, only_on: int | None = None) -> None:
    model = make_gpt(depth=1)
    model.blocks[0].up.weight.requires_grad_(False)
    dmuon.dedicate_params(model, mesh)
    if fsdp:
        shard(model, mesh)
    if only_on in (None, rank_of(mesh)):
        model.blocks[0].up.weight.requires_grad_(True)
    dmuon.Muon(model)


@refused(
    "Muon: model: 'embedding.weight' was frozen between", "freeze before dedicate_params, or after Muon", fsdp=True
)
@refused("Muon: model: 'embedding.weight' was frozen between", "these would be trained", fsdp=False)
@refused("Muon: model: 'embedding.weight' was frozen between", "these would be trained", fsdp=True, only_on=1)
def frozen_between(mesh: Any, fsdp: bool, only_on: int | None = None) -> None:
    """As for fine-tuning, parameter by parameter: a loop that sees no matrix."""
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    if fsdp:
        shard(model, mesh)
    if only_on in (None, rank_of(mesh)):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("head" in name)
    dmuon.Muon(model)


@refused("register_parameter between", "'blocks.0.up.weight' is Muon's already", "at dedicate_params")
def weight_registered_between(mesh: Any) -> None:
    up = dedicated(mesh).blocks[0].up
    up.register_parameter("other", None)
    up.register_parameter("weight", nn.Parameter(torch.ones(41, 24)))


@refused("'blocks.0.up.weight' or its module was replaced or removed")
def weight_deleted_between(mesh: Any) -> None:
    model = dedicated(mesh)
    del model.blocks[0].up.weight
    dmuon.Muon(model)


@refused("'blocks.0.up.weight' or its module was replaced")
def tensor_assigned_between(mesh: Any) -> None:
    """No parameter, and so beside the module's parameters."""
    model = dedicated(mesh)
    model.blocks[0].up.weight = torch.ones(41, 24)
    dmuon.Muon(model)


@refused("a state dict was taken or loaded between", "load weights before dedicate_params")
def load_between_changes_nothing(mesh: Any) -> None:
    model = make_gpt(depth=1)
    saved = make_gpt(seed=1, depth=1).state_dict()
    before = model.embedding.weight.detach().clone()
    dmuon.dedicate_params(model, mesh)
    try:
        model.load_state_dict(saved)
    finally:
        assert torch.equal(model.embedding.weight, before)


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
