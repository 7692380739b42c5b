"""Whatever is done wrongly with a trained model raises ValueError, says what to do, and leaves processes usable."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import batch, loss_of
from pool import make_mesh
from refusals import REFUSED, Refusals, expect_refusal, rank_of, ready, with_gradients
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard
from training import weights_of

import dmuon

refused = Refusals()


@refused("register_hook on 'blocks.0.up.weight': its gradient is summed up at its owner", kind="register_hook")
@refused("grad_hook on 'blocks.0.up.weight'", kind="register_post_accumulate_grad_hook")
def hook_after(mesh: Any, kind: str) -> None:
    model, _ = ready(mesh)
    getattr(model.blocks[0].up.weight, kind)(lambda _: None)


@refused("after a backward under no_sync", "dmuon.clip_grad_norm_(model, max_norm)", foreach=None)
@refused("after a backward under no_sync", "dmuon.clip_grad_norm_(model, max_norm)", foreach=True)
def torch_clip(mesh: Any, foreach: bool | None) -> None:
    model, _ = with_gradients(mesh, fsdp=False)
    with dmuon.no_sync(model):
        loss_of(model, batch(2)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)


@refused(
    "on 'blocks.0.qkv.weight.grad'", "clip_grad_value_ would", "dmuon.clip_grad_norm_(model, max_norm)", fsdp=False
)
@refused("on 'blocks.0.qkv.weight.grad'", "clip_grad_value_ would", "dmuon.clip_grad_norm_(model, max_norm)", fsdp=True)
def torch_clip_value(mesh: Any, fsdp: bool) -> None:
    """Clips matrices alone: under fully_shard the foreach functions of torch refuse them beside DTensors."""
    model = with_gradients(mesh, fsdp=fsdp)[0]
    nn.utils.clip_grad_value_([block.qkv.weight for block in model.blocks], 1.0)


@refused(
    "a norm of order inf (expected the 2-norm of all elements) on", "Clip by dmuon.clip_grad_norm_", order=math.inf
)
@refused("a norm of order 1.0 (expected the 2-norm of all elements) on", "dmuon.grad_norms(model)", order=1.0)
def torch_clip_of_another_order(mesh: Any, order: float) -> None:
    nn.utils.clip_grad_norm_(with_gradients(mesh)[0].blocks[0].up.weight, 1.0, norm_type=order)


@refused("aten.abs.default on 'blocks.0.up.weight.grad'", "whole only at its owner", "optimizer.skipped_steps")
def gradient_used(mesh: Any) -> None:
    with_gradients(mesh)[0].blocks[0].up.weight.grad.abs()


@refused("parameters_to_vector and vector_to_parameters read and write whole", "full_params", to_vector=True)
@refused("parameters_to_vector and vector_to_parameters read and write whole", "full_params", to_vector=False)
def converted_to_a_vector(mesh: Any, to_vector: bool) -> None:
    weight = ready(mesh)[0].blocks[0].up.weight
    if to_vector:
        nn.utils.parameters_to_vector([weight])
    else:
        nn.utils.vector_to_parameters(torch.zeros(weight.numel()), [weight])


@refused("fully_shard or replicate() after dmuon.Muon", "Expected: fully_shard before", call="fully_shard a block")
@refused("fully_shard or replicate() after dmuon.Muon", "Expected: fully_shard before", call="fully_shard")
@refused("fully_shard or replicate() after dmuon.Muon", "Expected: fully_shard before", call="replicate")
def sharded_after_muon(mesh: Any, call: str) -> None:
    """Everything in the model is as it was: each parameter, and what a good step makes of it."""
    model, optimizer = ready(mesh, fsdp=False)
    before = dict(model.named_parameters())
    mesh = make_mesh((4,), mesh.device_type)
    try:
        if call == "replicate":
            replicate(model, mesh=mesh)
        else:
            fully_shard(model if call == "fully_shard" else model.blocks[1], mesh=mesh)
    finally:
        assert all(p is before[name] for name, p in model.named_parameters())
        loss_of(model, batch(1)).backward()
        optimizer.step()


@refused("torch.func.functional_call gives the model other values of 'blocks.0.", "which Muon updates", fsdp=False)
@refused("torch.func.functional_call gives the model other values of 'blocks.0.", "which Muon updates", fsdp=True)
def functional_call(mesh: Any, fsdp: bool) -> None:
    model, _ = ready(mesh, fsdp=fsdp)
    copies = {name: p.detach() for name, p in model.named_parameters() if name.startswith("blocks")}
    torch.func.functional_call(model, copies, (batch(0)[:, :-1],))


@refused("copying or pickling a model", "its state_dict(), for a model that is built anew")
def deepcopy(mesh: Any) -> None:
    copy.deepcopy(ready(mesh, fsdp=False)[0])


@refused("numpy on 'blocks.0.up.weight'", "full_params", how="numpy")
@refused("tolist on 'blocks.0.up.weight'", "full_params", how="tolist")
def taken_to_python(mesh: Any, how: str) -> None:
    getattr(ready(mesh, fsdp=False)[0].blocks[0].up.weight.detach(), how)()


@refused("pickling on 'blocks.0.up.weight'", "full_params")
def pickled(mesh: Any) -> None:
    pickle.dumps(ready(mesh, fsdp=False)[0].blocks[0].up.weight)


@refused("copying or pickling a model", "or for torch.save")
def torch_save_of_a_model(mesh: Any) -> None:
    torch.save(ready(mesh, fsdp=False)[0], io.BytesIO())


@refused("normal_.default on 'blocks.0.up.weight'", "full_params")
def initialise_after(mesh: Any) -> None:
    nn.init.normal_(ready(mesh)[0].blocks[0].up.weight)


@refused("copying or pickling a model", "dmuon.Ema(model) for an average")
def average_weights(mesh: Any) -> None:
    torch.optim.swa_utils.AveragedModel(ready(mesh, fsdp=False)[0])


@refused("aten.clone.default on", "dmuon.Ema(model)", begins="late", foreach=False)
@refused("aten.sub.Tensor on", "To average weights: dmuon.Ema(model)", begins="early", foreach=False)
@refused("aten._foreach_sub.List on", "average by dmuon.Ema(model)", begins="early", foreach=True)
def diffusers_ema(mesh: Any, begins: str, foreach: bool) -> None:
    """EMAModel copies parameters, often before they are sharded, and computes as here."""
    model = ready(mesh, fsdp=False)[0]
    shadows = [torch.zeros(p.shape) if begins == "early" else p.clone().detach() for p in model.parameters()]
    if foreach:
        torch._foreach_sub_(shadows, torch._foreach_sub(shadows, [*model.parameters()]), alpha=0.1)
    for shadow, parameter in zip(shadows, model.parameters(), strict=True):
        shadow.sub_(0.1 * (shadow - parameter))


@refused("is this Accelerate's prepare?", "call it once, with an optimizer of torch, then dmuon.prepare")
def accelerate_after(mesh: Any) -> None:
    """Accelerate knows parameters by their addresses while it shards."""
    ready(mesh)[0].blocks[0].up.weight.data_ptr()


@refused("norm.default on 'blocks.0.up.weight'", "full_params")
def read_a_weight(mesh: Any) -> None:
    ready(mesh)[0].blocks[0].up.weight.norm()


@refused("on 'blocks.1.out.weight'", "outside of the model's modules", "full_params", how="linear")
@refused("on 'blocks.1.out.weight'", "outside of the model's modules", "full_params", how="inference")
@refused("on 'blocks.1.out.weight'", "outside of the model's modules", "full_params", how="times")
@refused("on 'blocks.1.out.weight'", "outside of the model's modules", "full_params", how="add")
@refused("on 'blocks.1.out.weight'", "outside of the model's modules", "full_params", how="forward of another")
def use_outside_of_the_model(mesh: Any, how: str) -> None:
    model, _ = ready(mesh)
    x, weight = torch.zeros(1, 24), model.blocks[1].out.weight

    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, weight)

    if how == "inference":
        with torch.inference_mode():
            nn.functional.linear(x, weight)
    elif how == "forward of another":
        Other()(x)
    else:
        {"linear": nn.functional.linear, "times": lambda x, w: x @ w.T, "add": torch.add}[how](x, weight)


@refused("on 'blocks.0.up.weight.grad'", "scaling by a tensor of shape (24,)", "one number alone", how="mul_")
@refused("on 'blocks.0.up.weight.grad'", "scaling by a tensor of shape (24,)", "one number alone", how="div_")
def scale_by_a_vector(mesh: Any, how: str) -> None:
    getattr(with_gradients(mesh)[0].blocks[0].up.weight.grad, how)(torch.ones(24))


@refused("the gradient of 'blocks.0.up.weight' was assigned, which its owner does not see", "None in its place")
def gradient_assigned(mesh: Any) -> None:
    model, optimizer = with_gradients(mesh)
    model.blocks[0].up.weight.grad = torch.zeros(41, 24)
    optimizer.step()


@refused("dmuon: 'blocks.0.up.weight' was replaced after dmuon.Muon", how="replaced")
@refused("dmuon: 'blocks.0.up.weight' was deleted after dmuon.Muon", how="deleted")
@refused("full_params: 'blocks.0.up.weight': expected shape (41, 24), got a deleted one", how="in full_params")
@refused("full_params: 'blocks.0.norm.weight': expected shape (24,), got a deleted one", how="AdamW's in full_params")
def weight_gone(mesh: Any, how: str) -> None:
    model, _ = ready(mesh)
    up = model.blocks[0].up
    if how == "replaced":
        up.weight = nn.Parameter(torch.zeros(41, 24))
    elif how == "deleted":
        del up.weight
    else:
        with dmuon.full_params(model, writeback=True):
            del (model.blocks[0].norm if "AdamW" in how else up).weight
    model(batch(0)[:, :-1])


@refused("aten.add.Tensor on 'blocks.0.up.weight'", "whole only at its owner", where={"a": 0})
@refused("aten.add.Tensor on a weight", "whole only at its owner", where=None)
def nested_in_arguments(mesh: Any, where: Any) -> None:
    """As an operator of higher order may be given it."""
    weight = ready(mesh)[0].blocks[0].up.weight
    type(weight.data).__torch_dispatch__(torch.ops.aten.add.Tensor, (), ({"a": [weight]} if where else iter([weight]),))


@refused("full_params: a forward inside it", "leave the context")
def forward_in_full_params(mesh: Any) -> None:
    model, _ = ready(mesh)
    with dmuon.full_params(model):
        model(batch(0))


@refused("full_params: model: expected one context at a time, got a nested one")
def nested_full_params(mesh: Any) -> None:
    model, _ = ready(mesh)
    with dmuon.full_params(model), dmuon.full_params(model):
        pass


@refused("clip_grad_norm_: max_norm: expected a positive number, got -1.0", max_norm=-1.0)
@refused("clip_grad_norm_: max_norm: expected a positive number, got True", max_norm=True)
@refused("clip_grad_norm_: max_norm: expected a positive number, got 1000", max_norm=10**400, only_on=1)
def clip_bad_norm(mesh: Any, max_norm: Any, only_on: int | None = None) -> None:
    dmuon.clip_grad_norm_(with_gradients(mesh)[0], max_norm if only_on in (None, rank_of(mesh)) else 1.0)


@refused("param_groups[0]: lr: expected a number, got a Tensor of shape ()", key="lr", value=torch.tensor(1j))
@refused("param_groups[1]: amsgrad: expected True or False, got 1", key="amsgrad", value=1)
@refused("TypeError: ", key="params", value=None)
def group_that_one_rank_spoils(mesh: Any, key: str, value: Any) -> None:
    model, opt = with_gradients(mesh)
    before = weights_of(model)
    if rank_of(mesh) == 1:
        opt.param_groups[key == "amsgrad"][key] = value
    try:
        opt.step()
    finally:
        assert all(torch.equal(weight, before[name]) for name, weight in weights_of(model).items())


@refused("full_params: writeback: expected True or False, got 'False'")
def full_params_with_a_text(mesh: Any) -> None:
    with dmuon.full_params(ready(mesh)[0], writeback="False"):  # type: ignore[arg-type]
        pass


@refused("clip or step after a backward under no_sync", "outside")
def step_after_no_sync(mesh: Any) -> None:
    model, opt = ready(mesh)
    with dmuon.no_sync(model):
        loss_of(model, batch(1)).backward()
    opt.step()


@refused("add_param_group: params[0]: expected matrices that Muon updates", "got a Parameter of shape (2, 2)")
def muon_group_of_strangers(mesh: Any) -> None:
    _, opt = ready(mesh)
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], "algorithm": "muon"})


@refused("norm_type: expected 2, the only norm that is supported, got 1", norm_type=1)
@refused("norm_type: expected 2", "'inf'", norm_type="inf")
@refused("error_if_nonfinite: expected True or False, got 1", error_if_nonfinite=1)
@refused("'s error_if_nonfinite = False; rank 2 has: ", "error_if_nonfinite = True", error_if_nonfinite=True, only_on=2)
def clip(mesh: Any, only_on: int | None = None, **options: Any) -> None:
    model, _ = with_gradients(mesh)
    dmuon.clip_grad_norm_(model, 1.0, **(options if only_on in (None, rank_of(mesh)) else {}))


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
