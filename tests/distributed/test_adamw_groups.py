"""Groups of AdamW's parameters that are wrong are refused on every rank, by index and by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batch, loss_of, make_gpt
from refusals import REFUSED, Refusals, expect_refusal, rank_of
from training import AHEAD, dedicate, shard, weights_of

import dmuon

refused = Refusals()


@refused("adamw_groups[1]", "'blocks.0.up.weight', which Muon updates", which="a matrix")
@refused("adamw_groups[1]", "'blocks.0.up.weight'", which="a matrix", only_on=2)
@refused("adamw_groups[1]", "'norm.weight' twice", which="twice")
@refused("groups[0]: params[0]", "shape (24,), which is no parameter of the model", which="another model's")
@refused("adamw_groups: expected a list of groups, got a dict with ['params']", which="no groups")
@refused("adamw_groups[0]: expected a dict with 'params', got list", which="no params")
@refused("adamw_groups[0]: params", "got 'norm.wait', a name of no such parameter", which="a name")
@refused("adamw_groups[0]: params", "'blocks.0.up.weight', which Muon updates", which="a matrix's name")
@refused("adamw_groups[0]: params: expected parameters that AdamW updates", "a choice of none", which="chosen")
@refused("adamw_groups[0]: params: expected names, parameters, or a function", "got 3", which="a number")
@refused("adamw_groups[0]: params[1]: expected a parameter of the model, got 3", which="a number beside")
@refused("adamw_groups[0]: params: expected names", "in an order, got {", which="a set")
@refused("adamw_groups[0]: expected a dict with 'params', got a dict with ['param']", which="other keys")
@refused("Muon: adamw_groups[0]: weight_decay: expected a number in [0, inf), got -1", which="decay")
@refused("Muon: adamw_groups[0]: lr: expected one element, got a tensor of shape (2, 2)", which="lr")
@refused("Muon: adamw_groups[0]: betas: expected two numbers, got a Tensor of shape (3, 3)", which="betas")
@refused("adamw_groups[0]: algorithm", "'muon'", which="muon")
@refused("ranks differ", "norm.weight", which="good", only_on=1)
def adamw_groups(mesh: Any, which: str, only_on: int | None = None) -> None:
    model = make_gpt(depth=1)
    matrix = model.blocks[0].up.weight
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    norm = model.norm.weight
    given: dict[str, Any] = {
        "a matrix": [{"params": [norm]}, {"params": [matrix], "weight_decay": 0.0}],
        "twice": [{"params": norm}, {"params": [("norm", norm)]}],
        "another model's": [{"params": [make_gpt(depth=1).norm.weight]}],
        "no groups": {"params": [norm]},
        "no params": [[norm]],
        "a name": [{"params": ["norm.wait"]}],
        "a matrix's name": [{"params": ["blocks.0.up.weight"]}],
        "chosen": [{"params": lambda name, module, p: False}],
        "a number": [{"params": 3}],
        "a number beside": [{"params": [norm, 3]}],
        "a set": [{"params": {norm}}],
        "decay": [{"params": [norm], "weight_decay": -1.0}],
        "lr": [{"params": [norm], "lr": torch.ones(2, 2)}],
        "betas": [{"params": [norm], "betas": torch.ones(3, 3)}],
        "other keys": [{"param": [norm]}],
        "muon": [{"params": [norm], "algorithm": "muon"}],
        "good": [{"params": [norm], "weight_decay": 0.0}],
    }
    dmuon.Muon(model, adamw_groups=given[which] if only_on in (None, rank_of(mesh)) else ())


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


def with_other_groups(mesh: Any) -> list[set[str]]:
    """Names of what a step changes if the user replaces all groups by such of rate 0, and if AdamW's go."""
    found = []
    for replaced in (
        lambda groups: [{**group, "lr": 0.0} for group in groups],
        lambda groups: [group for group in groups if group["algorithm"] == "muon"],
    ):
        model = make_gpt(depth=1)
        dedicate(model, mesh, AHEAD)
        shard(model, mesh)
        optimizer = dmuon.Muon(model, lr=0.1)
        before = weights_of(model)
        optimizer.param_groups = replaced(optimizer.param_groups)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        found.append({name for name, value in weights_of(model).items() if not torch.equal(value, before[name])})
    return found


def test_a_step_uses_the_groups_that_are_there(ranks):
    matrices = {row.name for row in dmuon.dedicate_params(make_gpt(depth=1)) if row.algorithm == "muon"}
    assert ranks.run(with_other_groups, (2,)) == [[set(), matrices]] * 2


@refused("Muon: param_groups[2]: expected parameters that opt.add_param_group has added", "'head.weight'", which="new")
@refused("no other group has, got 'norm.weight', also in param_groups[1]", which="twice")
def appended(mesh: Any, which: str) -> None:
    model = make_gpt(depth=1)
    model.head.requires_grad_(which == "twice")
    dedicate(model, mesh, AHEAD)
    optimizer = dmuon.Muon(model)
    model.head.requires_grad_(True)
    added = {"new": model.head.weight, "twice": model.norm.weight}[which]
    optimizer.param_groups.append({**optimizer.param_groups[1], "params": [added]})
    loss_of(model, batch(0)).backward()
    optimizer.step()


def with_options_of_later(mesh: Any) -> list[str]:
    """Returns what is unlike torch's AdamW if `amsgrad` comes before the first step, in dicts of the user's own."""
    model, plain = make_gpt(depth=1), make_gpt(depth=1)
    model.blocks.requires_grad_(False)
    plain.blocks.requires_grad_(False)
    dedicate(model, mesh, AHEAD)
    optimizer = dmuon.Muon(model, adamw_lr=0.01)
    (group,) = optimizer.param_groups
    optimizer.param_groups = [{k: group[k] for k in ("params", "algorithm", "lr", "betas", "eps", "weight_decay")}]
    optimizer.param_groups[0]["amsgrad"] = True
    trained = [p for p in plain.parameters() if p.requires_grad]
    options = {k: group[k] for k in ("lr", "betas", "eps", "weight_decay")}
    theirs = torch.optim.AdamW(trained, amsgrad=True, **options)
    for step in range(4):
        for either, opt in ((model, optimizer), (plain, theirs)):
            (loss_of(either, batch(step)) * (10 if step == 0 else 1)).backward()
            opt.step()
            opt.zero_grad()
    weights = weights_of(model)
    return [n for n, p in plain.named_parameters() if not torch.allclose(p, weights[n], rtol=1e-5, atol=1e-6)]


def test_options_may_come_later(ranks):
    assert ranks.run(with_options_of_later, (2,)) == [[]] * 2


def saved_without_a_parameter(mesh: Any) -> tuple[int, int]:
    """Returns how many states are saved after two parameters left their groups, and how many parameters did not."""
    model = make_gpt(depth=1)
    dedicate(model, mesh, AHEAD)
    optimizer = dmuon.Muon(model)
    for group in optimizer.param_groups:
        del group["params"][0]
    return len(optimizer.state_dict()["state"]), sum(len(group["params"]) for group in optimizer.param_groups)


def test_a_parameter_may_leave_its_group_before_a_save(ranks):
    for saved, grouped in ranks.run(saved_without_a_parameter, (2,)):
        assert saved == grouped > 5


def one_step(mesh: Any, is_empty_group_there: bool) -> dict[str, torch.Tensor]:
    model = make_gpt(depth=1)
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    optimizer = dmuon.Muon(model, lr=0.1, adamw_groups=[{"params": []}] if is_empty_group_there else ())
    if is_empty_group_there:
        optimizer.add_param_group({"params": []})
    loss_of(model, batch(0)).backward()
    optimizer.step()
    return weights_of(model)


def test_a_group_may_be_empty(ranks):
    with_group, without = (ranks.run(one_step, (2, 2), is_empty_group_there=there)[0] for there in (True, False))
    assert all(torch.equal(value, with_group[name]) for name, value in without.items())
