"""A refused call changes nothing: made again it says the same, and then training goes on exactly."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import batch, loss_of, make_gpt, part
from refusals import rank_of, trains_on_exactly
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from training import AHEAD, LR, WEIGHT_DECAY, dedicate, place_of, shard, weights_of

import dmuon

OPTIONS = {"lr": LR, "weight_decay": WEIGHT_DECAY, "ns_dtype": torch.float32}


def said(action: Callable[[], Any], words: str) -> None:
    """Asserts that two calls raise ValueError alike, with these words."""
    messages = []
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            action()
        messages.append(str(caught.value))
    assert words in messages[0] and messages[0] == messages[1], messages


ARGUMENTS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 2.0},
    "adamw_betas": {"adamw_betas": 0.9},
    "ns_coefficients": {"ns_coefficients": "sextic"},
    "adamw_groups[0]": {"adamw_groups": [{"params": ["norm.weight", "norm"]}]},
    "muon_groups[1]": {"muon_groups": [{"params": "blocks.0.up"}, {"params": "blocks"}]},
    "adamw_groups": {"adamw_groups": {"params": "norm"}},
}


@torch.no_grad()
def spoiled(mesh: Any, model: nn.Module, matrix: torch.Tensor, which: str) -> tuple[Callable[[], Any], str]:
    """Makes the model unfit for Muon. Returns what undoes it, and words of the error."""
    match which:
        case "frozen":
            model.norm.weight.requires_grad_(False)
            return lambda: model.norm.weight.requires_grad_(True), "'norm.weight' was frozen between"
        case "added":
            model.extra = nn.Linear(2, 2)
            return lambda: delattr(model, "extra"), "'extra.weight' was added after dedicate_params"
        case "cast":
            model.double()
            return model.float, "its module has become torch.float64"
        case "replaced":
            old, model.blocks[0].up = model.blocks[0].up, nn.Linear(24, 41)
            return lambda: setattr(model.blocks[0], "up", old), "was replaced or removed"
        case "values":
            before = matrix.clone()
            matrix.add_(rank_of(mesh))
            return lambda: matrix.data.copy_(before), "blocks.0.up.weight"
        case _:
            sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
            for module in sharded:
                module.set_gradient_divide_factor(2.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            size = float(mesh.size())
            return lambda: [module.set_gradient_divide_factor(size) for module in sharded], "divide_factor"


def muon(mesh: Any, which: str, only_on: int | None) -> None:
    model = make_gpt(depth=1)
    matrix = model.blocks[0].up.weight
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    if which in ARGUMENTS:
        options = ARGUMENTS[which] if only_on in (None, rank_of(mesh)) else {}
        said(lambda: dmuon.Muon(model, **options), which)
    else:
        undo, words = spoiled(mesh, model, matrix, which)
        said(lambda: dmuon.Muon(model), words)
        undo()
    opt = dmuon.Muon(model, **OPTIONS)
    said(lambda: dmuon.Muon(model), "expected one Muon a model, got a second one")
    trains_on_exactly(mesh, model, opt)


@pytest.mark.parametrize(
    ("which", "only_on"),
    [
        *((which, None) for which in ARGUMENTS),
        ("momentum", 1),
        ("muon_groups[1]", 2),
        *((which, None) for which in ("frozen", "added", "cast", "replaced", "values", "divide_factor")),
    ],
)
def test_muon(ranks, which, only_on):
    ranks.run(muon, (2, 2), which=which, only_on=only_on)


WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "select: selected 'blocks.0.norm.weight'": {"select": lambda name, _module, _parameter: "norm" in name},
    "select: expected True, False": {"select": lambda *_: "muon"},
    "KeyError": {"select": lambda *_: {}["missing"]},
    "lookahead": {"lookahead": -1},
    "mp_policy": {"mp_policy": "bf16"},
    "strategy": {"strategy": "fastest"},
    "gradient hooks": {},
}


def dedicated_wrongly(mesh: Any, words: str, only_on: int | None) -> None:
    model = make_gpt(depth=1)
    wrong = WRONG_OPTIONS[words] if only_on in (None, rank_of(mesh)) else {}
    hook = model.blocks[0].up.weight.register_hook(lambda gradient: gradient) if not wrong and only_on is None else None
    said(lambda: dmuon.dedicate_params(model, mesh, **wrong), words)
    if hook is not None:
        hook.remove()
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    trains_on_exactly(mesh, model, dmuon.Muon(model, **OPTIONS))


@pytest.mark.parametrize(("words", "only_on"), [*((words, None) for words in WRONG_OPTIONS), ("lookahead", 1)])
def test_dedicate_params(ranks, words, only_on):
    ranks.run(dedicated_wrongly, (2, 2), words=words, only_on=only_on)


def made(mesh: Any, which: str) -> tuple[nn.Module, dmuon.Muon]:
    model = make_gpt(depth=1)
    dedicate(model, mesh, AHEAD)
    if which not in REFUSED_BY_FSDP2:
        shard(model, mesh)
    opt = dmuon.Muon(model, muon_groups=[{"params": "blocks.0.up", "lr": 0.05}], **OPTIONS)
    return model, opt


def backward(mesh: Any, model: nn.Module, step: int) -> None:
    loss_of(model, part(batch(step), *place_of(mesh))).backward()


def state(mesh: Any, which: str) -> None:
    """State dicts that do not fit, and a step, in the midst of training."""
    ends = []
    for refuses in (False, True):
        model, opt = made(mesh, which)
        backward(mesh, model, 0)
        opt.step()
        opt.zero_grad()
        saved, weights = opt.state_dict(), model.state_dict()
        groups = [dict(group) for group in opt.param_groups]
        backward(mesh, model, 1)
        if refuses:
            refuse(mesh, which, opt, model, saved, weights)
            now = [dict(group) for group in opt.param_groups]
            assert all({**a, "params": 0} == {**b, "params": 0} for a, b in zip(groups, now, strict=True))
        opt.step()
        opt.zero_grad()
        backward(mesh, model, 2)
        opt.step()
        ends.append(weights_of(model))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def inside(context: Any, action: Callable[[], Any]) -> None:
    with context:
        action()


def averaged(model: nn.Module, action: Callable[[], Any]) -> None:
    with dmuon.Ema(model, decay=0.5).applied():
        action()


def edited_apart(mesh: Any, model: nn.Module) -> None:
    with dmuon.full_params(model, writeback=True), torch.no_grad():
        model.blocks[0].up.weight.add_(1 + rank_of(mesh))


def up(model: nn.Module) -> torch.Tensor:
    return model.blocks[0].up.weight


REFUSED_BY_FSDP2 = ("replicas", "deepcopy")  # in its own words, on a model that it manages
Misuse = Callable[[Any, nn.Module, Any], Any]
MISUSES: dict[str, tuple[Misuse, str]] = {
    "half": (lambda mesh, model, opt: model.half(), "blocks.0"),
    "double of a block": (lambda mesh, model, opt: model.blocks[0].double(), "blocks.0"),
    "to": (lambda mesh, model, opt: model.to(torch.bfloat16), "blocks.0"),
    "to_empty": (lambda mesh, model, opt: model.to_empty(device="meta"), "blocks.0"),
    "share_memory": (lambda mesh, model, opt: model.share_memory(), "blocks.0"),
    "dedicate_params": (lambda mesh, model, opt: dmuon.dedicate_params(model, mesh), "dedicated already"),
    "replicas": (lambda mesh, model, opt: DistributedDataParallel(model), "DistributedDataParallel"),
    "deepcopy": (lambda mesh, model, opt: copy.deepcopy(model), "copying or pickling a model"),
    "save": (lambda mesh, model, opt: torch.save(model, io.BytesIO()), "copying or pickling a model"),
    "read": (lambda mesh, model, opt: up(model).norm(), "norm"),
    "use": (lambda mesh, model, opt: nn.functional.linear(torch.ones(2, 24), up(model)), "outside of the model's"),
    "initialise": (lambda mesh, model, opt: nn.init.normal_(up(model)), "normal_"),
    "data": (lambda mesh, model, opt: setattr(up(model), "data", torch.ones(41, 24)), "assigning .data"),
    "hook": (lambda mesh, model, opt: up(model).register_hook(print), "register_hook"),
    "clip": (lambda mesh, model, opt: dmuon.clip_grad_norm_(model, -1.0), "max_norm"),
    "clip by another norm": (lambda mesh, model, opt: dmuon.clip_grad_norm_(model, 1.0, norm_type=1), "norm_type"),
    "clip value": (lambda mesh, model, opt: nn.utils.clip_grad_value_([up(model)], 1e-3), "weight.grad"),
    "vector": (lambda mesh, model, opt: up(model).grad.mul_(torch.ones(24)), "scaling by a tensor"),
    "clip on one rank": (
        lambda mesh, model, opt: dmuon.clip_grad_norm_(model, 1.0, error_if_nonfinite=rank_of(mesh) == 0),
        "ranks differ",
    ),
    "second full_params": (
        lambda mesh, model, opt: inside(dmuon.full_params(model), lambda: inside(dmuon.full_params(model), up)),
        "one context at a time",
    ),
    "forward in full_params": (
        lambda mesh, model, opt: inside(dmuon.full_params(model), lambda: backward(mesh, model, 1)),
        "leave the context first",
    ),
    "edits that differ": (lambda mesh, model, opt: edited_apart(mesh, model), "same values written on every rank"),
    "backward in applied": (lambda mesh, model, opt: averaged(model, lambda: backward(mesh, model, 1)), "Ema.applied"),
    "step in applied": (lambda mesh, model, opt: averaged(model, opt.step), "Ema.applied"),
    "load in applied": (
        lambda mesh, model, opt: averaged(model, lambda: model.load_state_dict(make_gpt(depth=1).state_dict())),
        "Ema.applied",
    ),
    "load twice": (lambda mesh, model, opt: dmuon.load(model), "after dmuon.offload"),
    "verify with gradients": (lambda mesh, model, opt: dmuon.verify(model, opt), "no gradients that wait"),
    "parameters of another": (lambda mesh, model, opt: opt.add_param_group({"params": "nowhere"}), "nowhere"),
}


def refuse(mesh: Any, which: str, opt: Any, model: nn.Module, saved: dict[str, Any], weights: dict[str, Any]) -> None:
    group = opt.param_groups[1]
    match which:
        case "no momentum":
            saved["state"][0]["exp_avg"] = saved["state"][0].pop("momentum_buffer")
            said(lambda: opt.load_state_dict(saved), "expected 'momentum_buffer'")
        case "fewer groups":
            saved["param_groups"].pop()
            said(lambda: opt.load_state_dict(saved), "param_groups: expected groups of")
        case "other groups":
            saved["param_groups"][1]["algorithm"] = saved["param_groups"][0]["algorithm"]
            said(lambda: opt.load_state_dict(saved), "param_groups[1]: the checkpoint has other groups")
        case "another view":
            saved["param_groups"][0]["algorithm"] = 'muon {"blocks.0.up.weight": "2 of 2 x 2"}'
            said(lambda: opt.load_state_dict(saved), "views: 'blocks.0.up.weight' was 2 of 2 x 2")
        case "algorithm":
            saved["param_groups"][1]["algorithm"] = "adamw"
            said(lambda: opt.load_state_dict(saved), "param_groups[1]: expected a group of algorithm 'muon'")
        case "hyperparameter":
            saved["param_groups"][1]["lr"] = -1.0
            said(lambda: opt.load_state_dict(saved), "lr: expected a number in [0, inf), got -1")
        case "weights":
            del weights["blocks.0.up.weight"]
            said(lambda: model.load_state_dict(weights), "no values for 'blocks.0.up.weight'")
        case "step":
            group["lr"] = -1.0
            said(opt.step, "Muon: param_groups[1]: lr: expected a number in [0, inf), got -1")
            group["lr"] = 0.05
        case "step on one rank":
            group["lr"] = 0.05 if rank_of(mesh) else 0.06
            said(opt.step, "ranks differ")
            group["lr"] = 0.05
        case _ if which in MISUSES:
            action, words = MISUSES[which]
            said(lambda: action(mesh, model, opt), words)
        case _:
            rest = opt.param_groups[0]["params"]
            opt.param_groups[0]["params"] = rest[1:] if rank_of(mesh) else rest
            said(opt.step, "ranks differ")
            opt.param_groups[0]["params"] = rest


@pytest.mark.parametrize(
    "which",
    [
        "no momentum",
        "fewer groups",
        "other groups",
        "another view",
        "algorithm",
        "hyperparameter",
        "weights",
        "step",
        "step on one rank",
        "members on one rank",
        *MISUSES,
    ],
)
def test_state_dicts_and_steps(ranks, which):
    ranks.run(state, (2, 2), which=which)
