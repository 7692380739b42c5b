"""Programs that use dmuon wrongly; each raises on every rank, and the processes go on."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
import torch.nn as nn
from composition_cases import _Skips
from models import batch, loss_of, make_gpt
from pool import make_mesh
from scenario import LR, Session
from torch.distributed.fsdp import MixedPrecisionPolicy
from trajectory_cases import place_of, shard

import dmuon


def _rank(mesh: Any) -> int:
    return place_of(mesh)[0]


def _ready(mesh: Any, fsdp: bool = True) -> tuple[nn.Module, dmuon.Muon]:
    s = Session(mesh)
    model = s.start(make_gpt(depth=2), **({} if fsdp else {"units": None}))
    s.train(0)
    return model, s.opt


def _with_gradients(mesh: Any, fsdp: bool = True) -> tuple[nn.Module, dmuon.Muon]:
    model, opt = _ready(mesh, fsdp)
    loss_of(model, batch(1)).backward()
    return model, opt


def dedicate_on_this_mesh(mesh: Any, **options: Any) -> None:
    dmuon.dedicate_params(make_gpt(depth=1), mesh, **options)


def no_sync_without_muon(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    with dmuon.no_sync(model):
        pass


def lr_differs_at_a_step(mesh: Any) -> None:
    _, opt = _with_gradients(mesh)
    opt.param_groups[0]["lr"] *= 1 + _rank(mesh)
    opt.step()


def _every_rank(error: ValueError) -> ValueError:
    return ValueError(f"every rank: {error}; opt.param_groups, lr, max_norm")


def lr_wrong_on_one_rank(mesh: Any) -> None:
    """The others hear that something differs; nobody waits."""
    _, opt = _with_gradients(mesh)
    if _rank(mesh) == 1:
        opt.param_groups[0]["lr"] = -1.0
    try:
        opt.step()
    except ValueError as error:
        assert ("got -1" in str(error)) == (_rank(mesh) == 1)
        raise _every_rank(error) from error


def max_norm_wrong_on_one_rank(mesh: Any) -> None:
    model, _ = _with_gradients(mesh)
    try:
        dmuon.clip_grad_norm_(model, -1.0 if _rank(mesh) == 1 else 1.0)
    except ValueError as error:
        assert ("got -1" in str(error)) == (_rank(mesh) == 1)
        raise _every_rank(error) from error


def lr_differs_after_clipping(mesh: Any) -> None:
    """The step sends nothing then; the next one tells."""
    model, opt = _with_gradients(mesh)
    dmuon.clip_grad_norm_(model, 1.0)
    lr = opt.param_groups[0]["lr"]
    opt.param_groups[0]["lr"] = lr * (1 + _rank(mesh))
    opt.step()
    opt.param_groups[0]["lr"] = lr
    loss_of(model, batch(2)).backward()
    opt.step()


def step_after_no_sync(mesh: Any) -> None:
    model, opt = _ready(mesh)
    with dmuon.no_sync(model):
        loss_of(model, batch(1)).backward()
    opt.step()


def max_norm_differs(mesh: Any) -> None:
    model, _ = _with_gradients(mesh)
    dmuon.clip_grad_norm_(model, 1.0 + _rank(mesh))


def after_fully_shard(mesh: Any) -> None:
    model = make_gpt(depth=1)
    shard(model, mesh)
    dmuon.dedicate_params(model, mesh)


def twice(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    dmuon.dedicate_params(model, mesh)


def twice_after_muon(mesh: Any) -> None:
    dmuon.dedicate_params(_ready(mesh)[0], mesh)


def inside_a_dedicated_model(mesh: Any) -> None:
    dmuon.dedicate_params(_ready(mesh, fsdp=False)[0].blocks[0], mesh)


def forward_between(mesh: Any, fsdp: bool) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    if fsdp:
        shard(model, mesh)
    model(batch(0))


def forward_of_a_submodule_between(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    model.blocks[0].up(torch.zeros(1, 24))


def select_a_vector(mesh: Any) -> None:
    dedicate_on_this_mesh(mesh, select=lambda name, module, parameter: "norm" in name or None)


def select_returns_a_string(mesh: Any) -> None:
    dedicate_on_this_mesh(mesh, select=lambda *_: "muon")


def select_fails_on_one_rank(mesh: Any) -> None:
    dedicate_on_this_mesh(mesh, select=lambda *_: "muon" if _rank(mesh) == 2 else None)


def muon_without_dedicate(mesh: Any) -> None:
    dmuon.Muon(make_gpt(depth=1))


def muon_twice(mesh: Any) -> None:
    dmuon.Muon(_ready(mesh)[0])


def models_differ(mesh: Any) -> None:
    dmuon.dedicate_params(make_gpt(depth=1 + (_rank(mesh) == 1)), mesh)


def dtypes_differ(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model.bfloat16() if _rank(mesh) == 1 else model, mesh)


def options_differ(mesh: Any) -> None:
    dedicate_on_this_mesh(mesh, strategy="rank0" if _rank(mesh) == 1 else "round_robin")


def muon_options_differ(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    shard(model, mesh)
    dmuon.Muon(model, lr=LR * (1 + _rank(mesh)))


def muon_option_wrong_on_one_rank(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    shard(model, mesh)
    dmuon.Muon(model, momentum=2.0 if _rank(mesh) == 3 else 0.95)


def meta_model(mesh: Any) -> None:
    with torch.device("meta"):
        model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)


def cast_between(mesh: Any, fsdp: bool) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    if fsdp:
        shard(model, mesh)
    model.double()
    dmuon.Muon(model)


def load_between(mesh: Any, strict: bool) -> None:
    model = make_gpt(depth=1)
    saved = copy.deepcopy(model.state_dict())
    dmuon.dedicate_params(model, mesh)
    model.load_state_dict(saved, strict=strict)


def save_between(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    model.state_dict()


def other_mesh(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    shard(model, make_mesh((4,)))
    dmuon.Muon(model)


def cast_without_fsdp(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    dmuon.Muon(model)


def skips_in_the_first_step(mesh: Any, skip: int) -> None:
    torch.manual_seed(0)
    s = Session(mesh)
    s.start(_Skips(), units=None)
    s.backward(lambda model, rank: model(torch.ones(2, 10), (skip,) if rank == 1 else ()).sum())
    s.step()


def backward_differs_in_the_first_step(mesh: Any) -> None:
    torch.manual_seed(0)
    s = Session(mesh)
    model = s.start(_Skips(), units=None)
    if s.rank == 1:
        model.blocks[2].register_forward_hook(lambda module, args, output: output.detach())
    s.backward(lambda model, rank: model(torch.ones(2, 10)).sum())
    s.step()


def grad_scaler(mesh: Any, fsdp: bool) -> None:
    _, opt = _with_gradients(mesh, fsdp)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(opt)


def torch_clip(mesh: Any, fsdp: bool, foreach: bool | None) -> None:
    model, _ = _with_gradients(mesh, fsdp)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)


def torch_clip_value(mesh: Any) -> None:
    nn.utils.clip_grad_value_(_with_gradients(mesh, fsdp=False)[0].parameters(), 1.0)


def deepcopy(mesh: Any) -> None:
    copy.deepcopy(_ready(mesh, fsdp=False)[0])


def pickled(mesh: Any) -> None:
    pickle.dumps(_ready(mesh, fsdp=False)[0].blocks[0].up.weight)


def state_dict(mesh: Any, of: str = "model") -> None:
    model, opt = _ready(mesh)
    {"model": model, "block": model.blocks[0], "opt": opt}[of].state_dict()


def load_state_dict(mesh: Any, strict: bool = True) -> None:
    model, _ = _ready(mesh)
    model.load_state_dict(make_gpt(depth=2).state_dict(), strict=strict)


def load_optimizer(mesh: Any) -> None:
    _ready(mesh)[1].load_state_dict({"state": {}, "param_groups": []})


def initialise_after(mesh: Any) -> None:
    nn.init.normal_(_ready(mesh)[0].blocks[0].up.weight)


def average_weights(mesh: Any) -> None:
    torch.optim.swa_utils.AveragedModel(_ready(mesh, fsdp=False)[0])


def read_a_weight(mesh: Any) -> None:
    _ready(mesh)[0].blocks[0].up.weight.norm()


def forward_in_full_params(mesh: Any) -> None:
    model, _ = _ready(mesh)
    with dmuon.full_params(model):
        model(batch(0))


def nested_full_params(mesh: Any) -> None:
    model, _ = _ready(mesh)
    with dmuon.full_params(model), dmuon.full_params(model):
        pass


def clip_bad_norm(mesh: Any) -> None:
    dmuon.clip_grad_norm_(_with_gradients(mesh)[0], -1.0)


def muon_group_of_strangers(mesh: Any) -> None:
    _, opt = _ready(mesh)
    opt.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], "algorithm": "muon"})


def attempt(mesh: Any, name: str, options: dict[str, Any]) -> str:
    """The ValueError's message; then one good step, which proves that the process can go on."""
    try:
        globals()[name](mesh, **options)
    except ValueError as error:
        message = str(error)
    else:
        raise AssertionError(f"{name}: no error")
    if mesh.ndim <= 2:
        s = Session(mesh)
        s.start(make_gpt(depth=1))
        s.train(0)
    return message


def module_replaced_between(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    if _rank(mesh) == 1:
        model.blocks[0].up = nn.Linear(24, 41)
    dmuon.Muon(model)


def weight_assigned_between(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    model.blocks[0].up.weight = nn.Parameter(torch.ones(41, 24))
    dmuon.Muon(model)


def matrix_added_between(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh)
    model.blocks[0].up.adapter = nn.Linear(4, 4)
    shard(model, mesh)
    dmuon.Muon(model)


def hook_before(mesh: Any) -> None:
    model = make_gpt(depth=1)
    model.blocks[0].up.weight.register_hook(lambda grad: grad * 0)
    dmuon.dedicate_params(model, mesh)


def hook_after(mesh: Any, kind: str) -> None:
    model, _ = _ready(mesh)
    getattr(model.blocks[0].up.weight, kind)(lambda _: None)


def clip_by_two_numbers_on_one_rank(mesh: Any) -> None:
    model, _ = _with_gradients(mesh)
    dmuon.clip_grad_norm_(model, torch.ones(2) if _rank(mesh) == 1 else 1.0)


def select_raises(mesh: Any) -> None:
    try:
        dmuon.dedicate_params(make_gpt(depth=1), mesh, select=lambda name, *_: {}[name])
    except ValueError as error:
        assert isinstance(error.__cause__, KeyError)
        raise
