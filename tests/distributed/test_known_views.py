"""Models with interleaved and fused projections train, and go on, as on one process with every part a parameter."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
import torch.nn as nn
import torch.nn.functional as F
from checkpoints import full_state, group_of, unlike
from cut import Cut
from known_models import BUILD
from models import weights_of_plain
from torch.distributed.fsdp import fully_shard
from training import AHEAD, LR, NO_COPY, WEIGHT_DECAY, dedicate, place_of, weights_of

import dmuon

pytestmark = pytest.mark.cpu("the asynchronous device lacks operators that these models use")

SAVED, STEPS = 2, 4
ADAMW_EPS = 1e-3  # the biases of keys have gradients of nothing but rounding
INTERLEAVED = "gpt_neox.layers.1.attention.query_key_value.weight"
Matrices = Callable[[torch.Tensor], list[torch.Tensor]]

# The matrices of fused parameters as indices say it, of all heads together and by head.
TOGETHER: dict[str, Matrices] = {
    "query_key_value": lambda p: [p.view(4, 3, 16, 64)[:, i].reshape(64, 64) for i in range(3)],
    "qkv_proj": lambda p: [p[:64], p[64:96], p[96:]],
    "kv_a_proj_with_mqa": lambda p: [p[:16], p[16:]],
    "q_b_proj": lambda p: [p.view(4, 2, 8, 16)[:, i].reshape(32, 16) for i in range(2)],
    "kv_b_proj": lambda p: [p.view(4, 24, 16)[:, :8].reshape(32, 16), p.view(4, 24, 16)[:, 8:].reshape(64, 16)],
    "gate_up_proj": lambda p: [p[:96], p[96:]],
    "experts.gate_up_proj": lambda p: [half for expert in p for half in (expert[:48], expert[48:])],
    "experts.down_proj": lambda p: list(p.unbind()),
}
BY_HEAD: dict[str, Matrices] = TOGETHER | {
    "query_key_value": lambda p: list(p.view(12, 16, 64).unbind()),
    "qkv_proj": lambda p: list(p.split(16)),
    "q_b_proj": lambda p: list(p.split(8)),
    "kv_b_proj": lambda p: [part for head in p.split(24) for part in (head[:8], head[8:])],
}


def matrices_of(heads: bool) -> Callable[[str], Matrices | None]:
    def of(name: str) -> Matrices | None:
        *_, holder, last = f".{name}".removesuffix(".weight").split(".")
        key = f"experts.{last}" if holder == "experts" else last
        plain = re.search(r"layers\.\d+\..*(proj|dense\w*|gate)\.weight$", name)
        return (BY_HEAD if heads else TOGETHER).get(key, (lambda p: [p]) if plain else None)

    return of


def made(name: str) -> nn.Module:
    """With weights large enough that every gradient is far from rounding."""
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    tokens = torch.randint(4, 128, (8, 17), generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
    return F.cross_entropy(model(input_ids=tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


@functools.cache
def reference(name: str, heads: bool, **muon: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The weights before the first step and after the last, on one process."""
    model = made(name)
    initial, optimizer = weights_of_plain(model), Cut(model, matrices_of(heads), ADAMW_EPS, **muon)
    for step in range(STEPS):
        loss_of(model, step, 0, 1).backward()
        optimizer.step()
    return initial, weights_of_plain(model)


def started(mesh: Any, name: str, heads: bool, schedule: dict[str, Any], **muon: Any) -> tuple[nn.Module, dmuon.Muon]:
    model = made(name)
    dedicate(model, mesh, schedule, select=dmuon.views_for(model, heads=heads))
    if mesh is not None:
        for layer in next(module for module in model.modules() if isinstance(module, nn.ModuleList)):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, dmuon.Muon(
        model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32, adamw_lr=3e-4, adamw_eps=ADAMW_EPS, **muon
    )


def train(mesh: Any, model: nn.Module, optimizer: dmuon.Muon, steps: range) -> None:
    for step in steps:
        loss_of(model, step, *place_of(mesh)).backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(mesh: Any, directory: str, **of: Any) -> Any:
    model, optimizer = started(mesh, schedule=AHEAD, **of)
    train(mesh, model, optimizer, range(SAVED))
    weights, state = dsd.get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=directory, **group_of(mesh))
    return full_state(model, optimizer)


def resumed(mesh: Any, directory: str, before: Any, **of: Any) -> tuple[list[str], bool, dict[str, torch.Tensor]]:
    """What differs after loading, whether `verify` is content, and the last weights."""
    model, optimizer = started(mesh, schedule=NO_COPY, **of)
    train(mesh, model, optimizer, range(10, 11))  # which loading undoes
    weights, state = dsd.get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=directory, **group_of(mesh))
    dsd.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    differing = unlike(full_state(model, optimizer), before)
    train(mesh, model, optimizer, range(SAVED, STEPS))
    return differing, dmuon.verify(model, optimizer).ok, weights_of(model)


@pytest.mark.parametrize(
    ("name", "heads", "muon", "meshes"),
    [
        ("gpt neox", False, {}, [(2, 2), (1, 4)]),
        ("gpt neox", True, {}, [(1, 4), (2, 2)]),
        ("gpt neox", False, {"rule": "adamuon"}, [(1, 4), (2, 2)]),
        ("phi3", False, {}, [(2, 2), (1, 4)]),
        ("phi3", True, {}, [(1, 4), (2, 2)]),
        ("deepseek v3", False, {}, [(1, 4), (2, 2)]),
        ("deepseek v3", True, {}, [(2, 2), (1, 4)]),
        ("deepseek v3", False, {"rule": "normuon"}, [(2, 2), (1, 4)]),
        ("deepseek v3", True, {"rule": "muon", "cautious_weight_decay": True}, [(1, 4), (2, 2)]),
    ],
)
def test_parts_train_and_go_on_on_another_mesh_as_parameters_of_their_own(ranks, tmp_path, name, heads, muon, meshes):
    of = {"directory": str(tmp_path), "name": name, "heads": heads, **muon}
    before = ranks.run(saved, meshes[0], **of)
    initial, expected = reference(name, heads, **muon)
    for differing, ok, weights in ranks.run(resumed, meshes[1], before=before[0], **of):
        assert differing == [] and ok
        for parameter, weight in expected.items():
            moved = float((weight - initial[parameter]).norm())
            error = float((weights[parameter] - weight).norm())
            assert error <= 1e-3 * moved + 1e-6, f"{parameter}: |W - W_ref| = {error:.2e}, |W_ref - W_0| = {moved:.2e}"


def test_other_views_of_interleaved_rows_are_refused_by_name():
    state = started(None, "gpt neox", False, AHEAD)[1].state_dict()
    _, optimizer = started(None, "gpt neox", True, AHEAD)
    with pytest.raises(ValueError, match="views: ") as caught:
        optimizer.load_state_dict(state)
    assert f"'{INTERLEAVED}' was 4*(16 + 16 + 16) x 64 and is 12 of 16 x 64 now" in str(caught.value)
