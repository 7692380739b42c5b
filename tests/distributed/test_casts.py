"""A cast or move of a model after Muon passes where it changes nothing; else it raises, and nothing has changed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from models import VOCABULARY, make_gpt
from refusals import REFUSED, Refusals, expect_refusal, ready, with_gradients
from scenario import Session, check, language_loss
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import KEPT

refused = Refusals()


def casts_that_change_nothing(model: nn.Module) -> None:
    """What trainers do first, some of it in every epoch."""
    device = torch.get_default_device()
    model.to(device)
    model.to(torch.float32).to(device, torch.float32)
    model.to(dtype=torch.float32, non_blocking=True)
    model.float()
    model.blocks[0].to(device).up.float()
    if device.type == "cpu":
        model.cpu()


def cast_in_training(s: Session, takes_out: bool) -> None:
    """Maybe AdamW's groups lack a norm. Then the first step warns."""
    s.start(make_gpt(depth=2))
    if takes_out:
        norm = s.model.get_parameter("norm.weight")
        for group in (s.opt.adamw if s.reference else s.opt).param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter is not norm]
    for step in range(3):
        casts_that_change_nothing(s.model)
        s.backward(language_loss(step, s.size))
        casts_that_change_nothing(s.model)  # gradients too
        s.step()


@pytest.mark.parametrize("takes_out", [False, True])
@pytest.mark.parametrize("mesh", [(2, 2), (1,)])
def test_casts_that_change_nothing_leave_training_alone(ranks, mesh, takes_out):
    check(ranks, cast_in_training, mesh, schedule=KEPT, takes_out=takes_out)


class Recurrent(nn.Module):
    """A language model of one LSTM."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.recurrent = nn.LSTM(12, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.recurrent(self.embedding(tokens))[0])
        return logits


@torch.no_grad()
def flatten_as_on_cuda(module: nn.RNNBase) -> None:
    """Moves the weights into one tensor, below autograd, as `torch._cudnn_rnn_flatten_weight` does."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    weights = [weight for weight in module._flat_weights if weight is not None]
    if len(weights) != len(module._flat_weights_names):
        return
    together = torch.cat([weight.detach().flatten() for weight in weights])
    for weight, part in zip(weights, together.split([weight.numel() for weight in weights]), strict=True):
        with torch._C._ExcludeDispatchKeyGuard(keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU)):
            weight.set_(part.view(weight.shape))


def recurrent(s: Session) -> None:
    """cuDNN's tensor would keep the first weights for ever."""
    as_on_cuda = mock.patch.object(nn.RNNBase, "flatten_parameters", flatten_as_on_cuda)
    with nullcontext() if s.reference else as_on_cuda:
        s.start(Recurrent(), units=None)
        s.train(0, 1, 2)


@pytest.mark.cpu("replaces what the CPU leaves out")
@pytest.mark.parametrize("mesh", [(2, 2), (1,)])
def test_recurrent_layers_train_where_torch_flattens_their_weights(ranks, mesh):
    check(ranks, recurrent, mesh, schedule=KEPT)


CASTS = {
    "half": lambda model: model.half(),
    "double": lambda model: model.to(torch.float64),
    "bfloat16 of a block": lambda model: model.blocks[1].bfloat16(),
    "bfloat16 of a layer": lambda model: model.blocks[1].up.bfloat16(),
    "meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="meta"),
    "share_memory": lambda model: model.share_memory(),
}


@refused("would change 'blocks.0.qkv.weight', which is torch.float32 on", "before dedicate_params", how="half")
@refused("would change 'blocks.0.qkv.weight'", "model.state_dict()", "mp_policy", how="double")
@refused("would change 'blocks.1.qkv.weight'", "Nothing of this model has changed", how="bfloat16 of a block")
@refused("would change 'blocks.1.up.weight'", "Nothing of this model has changed", how="bfloat16 of a layer")
@refused("would change 'blocks.0.qkv.weight'", "Nothing of this model has changed", how="meta")
@refused("would change 'blocks.0.qkv.weight'", "Nothing of this model has changed", how="to_empty")
@refused("would change 'blocks.0.qkv.weight'", "Nothing of this model has changed", how="share_memory")
def cast_after(mesh: Any, how: str) -> None:
    for model, _ in (ready(mesh), with_gradients(mesh, fsdp=False)):
        before = [(p.dtype, p.device) for p in model.parameters()]
        try:
            CASTS[how](model)
        except ValueError as error:
            raised = error
        assert [(p.dtype, p.device) for p in model.parameters()] == before
    raise raised


@refused("would change 'blocks.0.up.weight', which is torch.bfloat16 on", "Nothing of this model has changed")
def cast_in_a_forward(mesh: Any) -> None:
    s = Session(mesh, KEPT)
    s.start(make_gpt(depth=2), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    layer = s.model.blocks[0].up
    layer.register_forward_pre_hook(lambda module, inputs: module.to(inputs[0].dtype) and None)  # as it is
    s.train(0, 1)
    layer.register_forward_pre_hook(lambda module, inputs: module.float() and None)
    s.train(2)


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
