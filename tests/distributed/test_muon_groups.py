"""Matrices have groups with hyperparameters of their own, named in any form and taken from the model at any time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import batch, loss_of, make_gpt, part
from reference import QUINTIC
from refusals import REFUSED, Refusals, expect_refusal, rank_of, trains_on_exactly
from scenario import Session, check
from training import AHEAD, KEPT, LR, NO_COPY, ON_DEMAND, WEIGHT_DECAY, dedicate, place_of, shard, weights_of

import dmuon

Groups = list[dict[str, Any]]

# One shape in groups of different hyperparameters, so that an owner's batch mixes them.
OWN: dict[str, dict[str, Any]] = {
    "blocks.0.up.weight": {"lr": 0.05},
    "blocks.1.up.weight": {"weight_decay": 0.0, "momentum": 0.5},
    "blocks.2.up.weight": {"nesterov": False},
    "blocks.1.qkv.weight": {"lr": 1e-3, "weight_decay": 0.4},
}


def one_group_each(s: Session) -> None:
    s.start(make_gpt(depth=3), muon_groups=lambda model: [{"params": name, **own} for name, own in OWN.items()])
    if s.reference:
        s.opt.own = OWN
    s.train(0, 1, 2)


@pytest.mark.parametrize(("mesh", "schedule"), [((2, 2), AHEAD), ((4,), NO_COPY), ((1,), KEPT), ((1, 3), ON_DEMAND)])
def test_each_matrix_of_a_batch_has_its_own_hyperparameters(ranks, mesh, schedule):
    check(ranks, one_group_each, mesh, schedule=schedule)


def iterations(s: Session) -> None:
    """Owners' batches of one shape by different iterations."""
    quintic = {"params": "blocks.*.up", "ns_coefficients": "quintic"}
    s.start(make_gpt(depth=2), muon_groups=lambda model: [quintic, {"params": "blocks.1.qkv", "ns_steps": 3}])
    if s.reference:
        rows = s.opt.rows
        s.opt.own = {name: {"rows": QUINTIC} for name in s.opt.matrices if "up" in name}
        s.opt.own["blocks.1.qkv.weight"] = {"rows": rows[:3]}
    s.train(0, 1)


def test_groups_may_iterate_otherwise(ranks):
    check(ranks, iterations, schedule=KEPT)


def chosen(name: str, module: nn.Module, parameter: nn.Parameter) -> bool:
    return isinstance(module, nn.Linear) and parameter.shape == (41, 24) and name.endswith("up.weight")


def late(model: nn.Module) -> list[Any]:
    return [block.up.weight for block in model.blocks]


# What means up.weight of both blocks; a function is called with the model before dedicate_params, after it, or after
# fully_shard.
FORMS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "names": ("before", lambda _: ["blocks.0.up.weight", "blocks.1.up.weight"]),
    "modules": ("before", lambda _: ("blocks.0.up", "blocks.1.up")),
    "a pattern": ("before", lambda _: "blocks.[01].u?"),
    "a choice": ("before", lambda _: chosen),
    "taken before": ("before", late),
    "named": ("before", lambda model: [(n, p) for n, p in model.named_parameters() if n.endswith("up.weight")]),
    "taken between": ("between", late),
    "taken after fully_shard": ("after", late),
    "both": ("before", lambda model: iter(["blocks.1.up", model.blocks[0].up.weight])),
}


def given(mesh: Any, form: str, meta: bool, sharded_first: bool) -> tuple[list[list[str]], dict[str, torch.Tensor]]:
    """(names in each group, weights after two steps)."""
    when, params_of = FORMS[form]
    torch.manual_seed(0)
    with torch.device("meta") if meta else torch.device(mesh.device_type):
        model = make_gpt(depth=2)
    if sharded_first:
        shard(model, mesh)
    params: Any = params_of(model) if when == "before" else None
    dedicate(model, mesh, AHEAD)
    params = params_of(model) if when == "between" else params
    if not sharded_first:
        shard(model, mesh)
    if meta:
        model.to_empty(device=mesh.device_type)
        torch.manual_seed(0)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    params = params_of(model) if when == "after" else params
    opt = dmuon.Muon(model, lr=LR, ns_dtype=torch.float32, muon_groups=[{"params": params, "lr": 0.05}])
    names = {id(p): name for name, p in model.named_parameters()}
    for step in range(2):
        loss_of(model, part(batch(step), *place_of(mesh))).backward()
        opt.step()
        opt.zero_grad()
    found = [[names[id(p)] for p in group["params"]] for group in opt.param_groups]
    return found, weights_of(model)


UPS = ["blocks.0.up.weight", "blocks.1.up.weight"]


@pytest.mark.parametrize(
    ("form", "meta", "sharded_first"),
    [
        *((form, False, False) for form in FORMS),
        *((form, True, False) for form in ("a choice", "taken before", "taken between", "taken after fully_shard")),
        *((form, False, True) for form in ("names", "taken before", "taken after fully_shard")),
    ],
)
def test_every_form_means_the_same_matrices(ranks, form, meta, sharded_first):
    (names, expected), *_ = ranks.run(given, (2, 2), form="names", meta=meta, sharded_first=False)
    assert sorted(names[1]) == UPS and len(names[0]) == 6 and "norm.weight" in names[2]
    for groups, weights in ranks.run(given, (2, 2), form=form, meta=meta, sharded_first=sharded_first):
        assert [sorted(group) for group in groups] == [sorted(group) for group in names]
        assert all(torch.equal(value, weights[name]) for name, value in expected.items())


def adamw_given(mesh: Any, form: str) -> list[list[str]]:
    model = make_gpt(depth=2)
    norms = [model.blocks[0].norm.weight, model.blocks[1].norm.weight]
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    params: Any = {
        "names": ["blocks.0.norm.weight", "blocks.1.norm.weight"],
        "a pattern": "blocks.*.norm.weight",
        "a choice": lambda name, module, p: (
            isinstance(module, nn.LayerNorm) and "blocks" in name and p is module.weight
        ),
        "taken before": norms,
    }[form]
    opt = dmuon.Muon(model, adamw_groups=[{"params": params, "weight_decay": 0.0}, {"params": "head", "lr": 0.1}])
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in opt.param_groups[-2:]]


@pytest.mark.parametrize("form", ["names", "a pattern", "a choice", "taken before"])
def test_adamw_groups_have_the_same_forms(ranks, form):
    expected = [["blocks.0.norm.weight", "blocks.1.norm.weight"], ["head.weight"]]
    assert ranks.run(adamw_given, (2, 2), form=form) == [expected] * 4


def scheduled(s: Session) -> None:
    """A list of factors, one a group: Muon's rest, the given one, AdamW's rest, the given one."""
    rates = [lambda step, f=f: f**step for f in (0.9, 0.5, 0.7, 0.3)]
    s.start(
        make_gpt(depth=2),
        muon_groups=lambda model: [{"params": "blocks.1", "lr": 0.05}],
        adamw_groups=lambda model: [{"params": "head", "lr": 0.01}],
    )
    if s.reference:
        head = s.model.head.weight
        rest = s.opt.adamw.param_groups[0]
        rest["params"] = [p for p in rest["params"] if p is not head]
        s.opt.adamw.add_param_group({"params": [head]})
        for step in range(3):
            s.opt.lr = LR * 0.9**step
            s.opt.own = {name: {"lr": 0.05 * 0.5**step} for name in s.opt.matrices if "blocks.1" in name}
            for group, lr, factor in zip(s.opt.adamw.param_groups, (3e-4, 0.01), (0.7, 0.3), strict=True):
                group["lr"] = lr * factor**step
            s.train(step)
        return
    scheduler = torch.optim.lr_scheduler.LambdaLR(s.opt, rates)
    for step in range(3):
        s.train(step)
        scheduler.step()


def test_a_scheduler_has_a_rate_for_each_group(ranks):
    check(ranks, scheduled, schedule=AHEAD)


def test_one_cycle_has_a_rate_for_each_group():
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, muon_groups=[{"params": "blocks.0.up"}])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.02, 0.01, 0.001], total_steps=4, pct_start=0.5)
    seen = []
    for step in range(3):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
        seen.append([group["lr"] for group in opt.param_groups])
    assert max(seen) == pytest.approx([0.02, 0.01, 0.001])


# ---- what is refused, twice, and training goes on exactly ----

refused = Refusals()

WRONG: dict[str, Callable[[nn.Module], Any]] = {
    "twice": lambda m: [{"params": ["blocks.0.up.weight", "blocks.0.up.weight"]}],
    "in two": lambda m: [{"params": "blocks.0"}, {"params": chosen}],
    "unknown": lambda m: [{"params": ["vison"]}],
    "unknown pattern": lambda m: [{"params": "vision.*"}],
    "AdamW's": lambda m: [{"params": ["norm.weight"]}],
    "AdamW's module": lambda m: [{"params": ["norm"]}],
    "AdamW's parameter": lambda m: [{"params": [m.norm.weight]}],
    "empty": lambda m: [{"params": []}],
    "none chosen": lambda m: [{"params": lambda name, module, p: False}],
    "no bool": lambda m: [{"params": lambda name, module, p: 1}],
    "raising": lambda m: [{"params": lambda name, module, p: p.lr_mult > 1}],
    "a module": lambda m: [{"params": m.blocks[0]}],
    "another model's": lambda m: [{"params": [make_gpt(depth=1).blocks[0].up.weight]}],
    "no list": lambda m: {"params": "blocks"},
    "no params": lambda m: [{"param": "blocks"}],
    "AdamW": lambda m: [{"params": "blocks", "algorithm": "adamw"}],
    "lr": lambda m: [{"params": "blocks", "lr": -1.0}],
    "ns_steps": lambda m: [{"params": "blocks", "ns_steps": 0}],
    "ns_coefficients": lambda m: [{"params": "blocks", "ns_coefficients": "sextic"}],
    "adjust_lr_fn": lambda m: [{"params": "blocks", "adjust_lr_fn": "kimi"}],
    "good": lambda m: [{"params": "blocks.0", "lr": 0.1}],
}


@refused("Muon: muon_groups[0]: params[1]: expected matrices that Muon", "'blocks.0.up.weight' twice", which="twice")
@refused("Muon: muon_groups[1]: params", "'blocks.0.up.weight' twice, also in muon_groups[0]", which="in two")
@refused("Muon: muon_groups[0]: params[0]: expected matrices", "got 'vison', a name of no such", which="unknown")
@refused("Muon: muon_groups[0]: params[0]", "got 'vision.*', a name of no such", which="unknown pattern")
@refused("Muon: muon_groups[0]: params[0]", "'norm.weight', which AdamW updates", "adamw_groups", which="AdamW's")
@refused("Muon: muon_groups[0]: params[0]", "got 'norm', a name of no such", which="AdamW's module")
@refused("Muon: muon_groups[0]: params[0]", "'norm.weight', which AdamW updates", which="AdamW's parameter")
@refused("Muon: muon_groups[0]: params: expected matrices that Muon updates, got none", which="empty")
@refused("Muon: muon_groups[0]: params: expected matrices", "got a choice of none", which="none chosen")
@refused("Muon: muon_groups[0]: params: expected True or False for 'blocks.0.qkv.weight', got 1", which="no bool")
@refused("Muon: muon_groups[0]: params: raised AttributeError for 'blocks.0.qkv.weight'", which="raising")
@refused("Muon: muon_groups[0]: params: expected names, parameters, or a function", "got a ", which="a module")
@refused("Muon: muon_groups[0]: params[0]", "which is no parameter of the model", which="another model's")
@refused("Muon: muon_groups: expected a list of groups, got a dict with ['params']", which="no list")
@refused("Muon: muon_groups[0]: expected a dict with 'params', got a dict with ['param']", which="no params")
@refused("Muon: muon_groups[0]: algorithm: expected 'muon' or nothing, got 'adamw'", which="AdamW")
@refused("Muon: muon_groups[0]: lr: expected a number in [0, inf), got -1", which="lr")
@refused("Muon: muon_groups[0]: ns_steps: expected an int", which="ns_steps")
@refused(
    "Muon: muon_groups[0]: ns_coefficients: expected rows (a, b, c) or a name", "'sextic'", which="ns_coefficients"
)
@refused("Muon: muon_groups[0]: adjust_lr_fn: expected", "kimi", which="adjust_lr_fn")
@refused("ranks differ", "muon_groups[0]", "blocks.0.qkv.weight", which="good", only_on=1)
@refused("muon_groups[0]: params[0]", "got 'vison'", which="unknown", only_on=2)
def muon_groups(mesh: Any, which: str, only_on: int | None = None) -> None:
    model = make_gpt(depth=1)
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    message = ""
    for _ in range(2):
        groups = WRONG[which](model) if only_on in (None, rank_of(mesh)) else ()
        with pytest.raises(ValueError) as caught:
            dmuon.Muon(model, muon_groups=groups)
        assert message in ("", str(caught.value))
        message = str(caught.value)
    opt = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    trains_on_exactly(mesh, model, opt)
    raise caught.value


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_training_goes_on(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


def added(mesh: Any, which: str) -> str:
    """add_param_group raises twice alike and changes nothing, not even its argument; returns what it says."""
    model = make_gpt(depth=1)
    before, bias = model.blocks[0].up.weight, model.blocks[0].up.bias
    gone = nn.Linear(3, 3)
    model.gone = gone
    former = gone.weight
    dedicate(model, mesh, AHEAD, select=lambda name, module, p: False if "gone" in name else None)
    between = model.blocks[0].up.weight
    shard(model, mesh)
    del model.gone
    opt = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    params: Any = {
        "matrix before": [before],
        "matrix between": [between],
        "matrix": [model.blocks[0].up.weight],
        "matrix by name": "blocks.0.up.weight",
        "bias before": [bias],
        "bias": [model.blocks[0].up.bias],
        "gone": [former],
        "empty choice": lambda name, module, p: False,
        "non-leaf": [torch.zeros(2, requires_grad=True) * 2],
        "decay": [nn.Parameter(torch.zeros(2))],
        "muon": "blocks.0.up",
        "muon's stranger": [nn.Parameter(torch.zeros(2, 2))],
        "algorithm": [nn.Parameter(torch.zeros(2))],
    }[which]
    options = {"decay": {"weight_decay": -1.0}, "algorithm": {"algorithm": "sgd"}}.get(which, {})
    options |= {"algorithm": "muon"} if "muon" in which else {}
    group = {"params": params, **options}
    groups = [(dict(g), list(g["params"])) for g in opt.param_groups]
    messages = set()
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            opt.add_param_group(group)
        messages.add(str(caught.value))
        assert group == {"params": params, **options} and group["params"] is params
        assert [(dict(g), list(g["params"])) for g in opt.param_groups] == groups
    trains_on_exactly(mesh, model, opt)
    assert len(messages) == 1
    return messages.pop()


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (
            "matrix before",
            "params[0]: expected parameters that AdamW updates, each once, got 'blocks.0.up.weight', whi",
        ),
        ("matrix between", "got 'blocks.0.up.weight', which Muon updates"),
        ("matrix", "got 'blocks.0.up.weight', which Muon updates"),
        ("matrix by name", "got 'blocks.0.up.weight', which Muon updates"),
        ("bias before", "parameters that no group has, got 'blocks.0.up.bias', which is in param_groups[1]"),
        ("bias", "parameters that no group has, got 'blocks.0.up.bias', which is in param_groups[1]"),
        ("gone", "got 'gone.weight' as it was before, which is no parameter of the model any more"),
        ("empty choice", "got a choice of none"),
        ("non-leaf", "non-leaf"),
        ("decay", "add_param_group: weight_decay: expected a number in [0, inf), got -1"),
        ("muon", "parameters that no group has, got 'blocks.0.up.weight', which is in param_groups[0]"),
        ("muon's stranger", "expected matrices that Muon updates, each once, got a Parameter of shape (2, 2)"),
        ("algorithm", "algorithm: expected 'muon' or 'adamw', got 'sgd'"),
    ],
)
def test_a_group_that_is_refused_later_changes_nothing(ranks, which, words):
    for message in ranks.run(added, (2, 2), which=which):
        assert message.startswith("add_param_group: ") or which == "non-leaf"
        assert words in message


def test_what_the_user_has_replaced_is_no_part_of_the_model():
    model = make_gpt(depth=1)
    former = model.norm.weight
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    model.norm.weight = nn.Parameter(torch.ones(24))
    with pytest.raises(
        ValueError, match=r"'norm.weight' as it was before, which is no parameter of the model any more"
    ):
        opt.add_param_group({"params": [former]})
    opt.add_param_group({"params": "norm.weight"})
    assert opt.param_groups[-1]["params"] == [model.norm.weight]


def test_a_tied_matrix_has_each_of_its_names():
    for name in ("0.weight", "2", "0"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        dmuon.dedicate_params(model)
        opt = dmuon.Muon(torch.compile(model), muon_groups=[{"params": name, "lr": 0.5}])
        assert [(group["lr"], len(group["params"])) for group in opt.param_groups[:2]] == [(1e-3, 1), (0.5, 1)]
        assert opt.param_groups[1]["params"][0] is model[0].weight


def moved_by_hand(s: Session) -> None:
    """A matrix moves to a group of its own: it leaves the list of the other first."""
    model = make_gpt(depth=2)
    before = model.blocks[1].up.weight
    s.start(model)
    if s.reference:
        s.opt.own = {name: {"lr": 0.05} for name in ("blocks.0.up.weight", "blocks.1.up.weight")}
    else:
        of = s.opt.param_groups[0]
        ups = [block.up.weight for block in model.blocks]
        of["params"] = [p for p in of["params"] if all(p is not up for up in ups)]
        s.opt.add_param_group({"params": ["blocks.0.up", before], "algorithm": "muon", "lr": 0.05})
    s.train(0, 1)


def test_a_group_added_later_takes_former_parameters(ranks):
    check(ranks, moved_by_hand, schedule=NO_COPY)
