"""Groups of matrices in an optimizer's state: they come back, and those of another run are refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
import torch.nn as nn
from checkpoints import group_of
from dmuon._saving import saved_algorithm
from models import batch, loss_of, make_gpt, part
from refusals import rank_of
from torch.distributed.fsdp import fully_shard
from training import AHEAD, LR, WEIGHT_DECAY, dedicate, place_of, shard, weights_of

import dmuon

Groups = list[dict[str, Any]]


def started(mesh: Any, groups: Groups) -> tuple[nn.Module, dmuon.Muon]:
    model = make_gpt(depth=2)
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    opt = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32, muon_groups=groups)
    return model, opt


def train(mesh: Any, model: nn.Module, opt: dmuon.Muon, *steps: int) -> None:
    for step in steps:
        loss_of(model, part(batch(step), *place_of(mesh))).backward()
        opt.step()
        opt.zero_grad()


def resumed(mesh: Any, by_name: bool) -> list[str]:
    """Names of the weights that differ from those of training without a break."""
    groups: Groups = [{"params": "blocks.1", "lr": 0.05}, {"params": "blocks.0.up", "momentum": 0.5}]
    model, opt = started(mesh, groups)
    train(mesh, model, opt, 0)
    opt.param_groups[1]["lr"] = 0.04
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if by_name:
        options = dsd.StateDictOptions(full_state_dict=True)
        saved = dsd.get_optimizer_state_dict(model, opt, options=options)
    else:
        saved = opt.state_dict()
    saved = {**saved, "state": {k: {n: t.clone() for n, t in v.items()} for k, v in saved["state"].items()}}
    train(mesh, model, opt, 1, 2)
    expected = weights_of(model)
    model, opt = started(mesh, [{"params": "blocks.1"}, {"params": "blocks.0.up"}])
    model.load_state_dict(weights)
    if by_name:
        dsd.set_optimizer_state_dict(model, opt, saved, options=options)
    else:
        opt.load_state_dict(saved)
    assert [g["lr"] for g in opt.param_groups[:3]] == [LR, 0.04, LR] and opt.param_groups[2]["momentum"] == 0.5
    train(mesh, model, opt, 1, 2)
    return [name for name, value in weights_of(model).items() if not torch.equal(value, expected[name])]


@pytest.mark.parametrize("by_name", [False, True])
def test_groups_are_saved_and_restored(ranks, by_name):
    assert ranks.run(resumed, (2, 2), by_name=by_name) == [[]] * 4


def test_a_saved_group_without_options_is_none_beside_one_that_has_some():
    model = make_gpt(depth=2)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, muon_groups=[{"params": "blocks.1"}])
    saved = opt.state_dict()
    saved["param_groups"][1] = {"params": saved["param_groups"][1]["params"]}
    with pytest.raises(ValueError, match=r"param_groups\[1\]: the checkpoint has other groups .* has, got none"):
        opt.load_state_dict(saved)


def test_the_views_are_described_once_however_many_groups_there_are():
    model = make_gpt(depth=2)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(
        model, muon_groups=[{"params": [f"blocks.{i}.{name}"]} for i in range(2) for name in ("up", "qkv")]
    )
    num_matrices = sum(len(group["params"]) for group in opt.param_groups if group["algorithm"] == "muon")
    with mock.patch.object(saved_algorithm, "described", wraps=saved_algorithm.described) as described:
        state = opt.state_dict()
        assert described.call_count == num_matrices
        opt.load_state_dict(state)
        assert described.call_count == 2 * num_matrices


def resumed_under_another_sharding(mesh: Any, directory: str) -> list[list[float]]:
    """Rates of the groups after `dcp.load`, where fully_shard manages all parameters now, or those of blocks alone."""
    found = []
    for root_then in (True, False):
        optimizers = []
        for has_root in (root_then, not root_then):
            model = make_gpt(depth=2)
            dedicate(model, mesh, AHEAD)
            for module in (*model.blocks, *([model] if has_root else [])):
                fully_shard(module, mesh=mesh)
            optimizers.append((model, dmuon.Muon(model, adamw_groups=[{"params": "head", "lr": 0.01}])))
        (model, opt), (later_model, later) = optimizers
        train(mesh, model, opt, 0)
        for group in opt.param_groups:
            group["lr"] *= 0.5
        path = f"{directory}/{root_then}"
        dcp.save({"optimizer": dsd.get_optimizer_state_dict(model, opt)}, checkpoint_id=path, **group_of(mesh))
        state = {"optimizer": dsd.get_optimizer_state_dict(later_model, later)}
        dcp.load(state, checkpoint_id=path, **group_of(mesh))
        dsd.set_optimizer_state_dict(later_model, later, state["optimizer"])
        found.append([group["lr"] for group in later.param_groups])
    return found


def test_rates_are_restored_under_another_sharding(ranks, tmp_path):
    rates = [[0.0005, 0.00015, 0.005]] * 2
    assert ranks.run(resumed_under_another_sharding, (2, 2), directory=str(tmp_path)) == [rates] * 4


ONE: Groups = [{"params": "blocks.1", "lr": 0.05}]
CHANGED: dict[str, tuple[Groups, Groups, bool]] = {
    "other members": (ONE, [{"params": "blocks.0", "lr": 0.05}], False),
    "other members by name": (ONE, [{"params": "blocks.?.up", "lr": 0.05}], True),
    "fewer by name": (ONE, [], True),
    "more by name": ([], ONE, True),
    "other sizes": (ONE, [{"params": "blocks.1.up", "lr": 0.05}], False),
    "more": ([], ONE, False),
}


def changed(mesh: Any, which: str) -> str:
    """What a state of other groups says, twice alike; then training goes on as without it."""
    then, now, by_name = CHANGED[which]
    options = dsd.StateDictOptions(full_state_dict=True)
    model, opt = started(mesh, then)
    train(mesh, model, opt, 0)
    saved = dsd.get_optimizer_state_dict(model, opt, options=options) if by_name else opt.state_dict()
    ends, messages = [], set()
    for refusals in (0, 2):
        model, opt = started(mesh, now)
        train(mesh, model, opt, 0)
        for _ in range(refusals):
            with pytest.raises(ValueError) as caught:
                if by_name:
                    dsd.set_optimizer_state_dict(model, opt, saved, options=options)
                else:
                    opt.load_state_dict(saved)
            messages.add(str(caught.value))
        train(mesh, model, opt, 1, 2)
        ends.append(weights_of(model))
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert len(messages) == 1
    if by_name:  # the way out
        saved["param_groups"] = dsd.get_optimizer_state_dict(model, opt, options=options)["param_groups"]
        rates = [group["lr"] for group in opt.param_groups]
        dsd.set_optimizer_state_dict(model, opt, saved, options=options)
        assert rates == [group["lr"] for group in opt.param_groups]
        train(mesh, model, opt, 3)
    return messages.pop()


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("other members", ["param_groups[0]: the checkpoint has other groups of matrices", "from 'blocks.0.qkv.weig"]),
        (
            "other members by name",
            ["param_groups[1]", "2 matrices from 'blocks.0.up.weight' on", "get_optimizer_state"],
        ),
        ("fewer by name", ["param_groups[0]", "Expected 8 matrices from 'blocks.0.qkv.weight' on"]),
        ("more by name", ["param_groups[1]", "4 matrices from 'blocks.1.qkv.weight' on", "got matrices of one group"]),
        ("other sizes", ["param_groups: expected groups of [7, 1, 10] parameters", "got [4, 4, 10]"]),
        ("more", ["param_groups: expected groups of [4, 4, 10] parameters", "got [8, 10]"]),
    ],
)
def test_a_state_of_other_groups_is_refused(ranks, which, words):
    for message in ranks.run(changed, (2, 2), which=which):
        assert [word for word in words if word not in message] == [], message


def test_a_state_with_text_for_keys_is_refused_and_what_a_user_put_there_comes_back():
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    train(None, model, opt, 0)
    saved = opt.state_dict()
    as_json = {**saved, "state": {str(number): state for number, state in saved["state"].items()}}
    with pytest.raises(
        ValueError, match=r"state: expected numbers of parameters as keys, got the text '\d', as JSON has"
    ):
        opt.load_state_dict(as_json)
    opt.load_state_dict({**saved, "state": {**saved["state"], "note": 3}})
    assert opt.state["note"] == 3
    matrix = next(iter(opt._runtime.leaf_of))
    opt.state[matrix].update(exp_avg=torch.ones(2), exp_avg_sq=torch.ones(2))
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert opt.state[matrix]["exp_avg"].equal(torch.ones(2))
    saved["state"][0]["step"] = torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"state of 'blocks.0.qkv.weight': expected Muon's, got AdamW's, one with"):
        opt.load_state_dict(saved)


def test_ranks_whose_groups_differ_later_raise(ranks):
    for message in ranks.run(differing_later, (2, 2)):
        assert "ranks differ" in message and "param_groups[0] of 8 parameters" in message


def differing_later(mesh: Any) -> str:
    model, opt = started(mesh, [])
    if rank_of(mesh) == 1:
        group = opt.param_groups[0]
        group["params"] = group["params"][1:]
        opt.add_param_group({"params": "blocks.0.qkv", "algorithm": "muon"})
    loss_of(model, part(batch(0), *place_of(mesh))).backward()
    with pytest.raises(ValueError) as caught:
        opt.step()
    return str(caught.value)
