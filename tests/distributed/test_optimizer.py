"""dmuon.Muon is a torch.optim.Optimizer: schedulers, closures, hooks and groups work as on one process."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn as nn
from checkpoints import unlike
from logged import logged
from models import batch, loss_of, make_gpt
from scenario import Session, check, language_loss
from training import AHEAD, FAR_AHEAD, KEPT, LR, NO_COPY, ON_DEMAND

import dmuon


def _muon_group(s: Session) -> dict[str, Any]:
    return next(g for g in s.opt.param_groups if g["algorithm"] == "muon")


def _set(s: Session, **options: Any) -> None:
    if s.reference:
        vars(s.opt).update(options)
    else:
        _muon_group(s).update(options)


def changed_hyperparameters(s: Session) -> None:
    s.start(make_gpt(depth=2))
    changes: list[dict[str, Any]] = [
        {"lr": 0.01},
        {"weight_decay": 0.3},
        {"momentum": 0.5},
        {"nesterov": False},
        {"lr": torch.tensor(0.03)} if not s.reference else {"lr": 0.03},
    ]
    for step, change in enumerate(changes):
        _set(s, **change)
        s.train(step)


def test_hyperparameters_are_read_at_every_step(ranks):
    check(ranks, changed_hyperparameters, schedule=FAR_AHEAD)


def began_anew(s: Session, how: str) -> None:
    """As torch's optimizers do without a state."""
    muon = {"rule": "normuon"} if how == "clear" else {}
    s.start(make_gpt(depth=2), muon=muon)
    for step in range(2):
        s.train(step)
    if s.reference:
        s.opt.moments.clear()
        for buffer in s.opt.buffers.values():
            buffer.zero_()
        s.opt.adamw.state.clear()
    elif how == "clear":
        s.opt.state.clear()
    elif how == "new":
        s.opt.state = defaultdict(dict)
    else:
        for state in s.opt.state.values():
            if "momentum_buffer" in state:
                state.pop("momentum_buffer")
                state["visits"] = torch.ones(())  # a user's own
            else:
                state.clear()
    if how == "new" and not s.reference:
        saved = s.opt.state_dict()["state"]
        assert all(not value.count_nonzero() for state in saved.values() for value in map(local, state.values()))
        assert sum("momentum_buffer" in state for state in saved.values()) == len(s.opt._runtime.leaf_of)
    for step in range(2, 4):
        s.train(step)


def local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


@pytest.mark.parametrize("how", ["clear", "new", "in each"])
@pytest.mark.parametrize("mesh", [(2, 2), (1,)])
def test_removed_states_begin_anew(ranks, mesh, how):
    check(ranks, began_anew, mesh, schedule=AHEAD, how=how)


def loaded_after_a_removal(s: Session) -> None:
    s.start(make_gpt(depth=2))
    for step in range(2):
        s.train(step)
    if not s.reference:
        saved = s.opt.state_dict()
        s.opt.state.clear()
        s.opt.load_state_dict(saved)
    for step in range(2, 4):
        s.train(step)


def test_a_load_replaces_removed_states(ranks):
    check(ranks, loaded_after_a_removal, schedule=AHEAD)


def scheduled(s: Session) -> None:
    s.start(make_gpt(depth=2))
    if s.reference:
        for step in range(4):
            s.opt.lr = LR * 0.7**step
            for group in s.opt.adamw.param_groups:
                group["lr"] = 3e-4 * 0.7**step
            s.train(step)
        return
    scheduler = torch.optim.lr_scheduler.ExponentialLR(s.opt, 0.7)
    for step in range(4):
        s.train(step)
        scheduler.step()


def test_schedulers_move_both_algorithms(ranks):
    check(ranks, scheduled, schedule=NO_COPY)


def one_cycle(mesh: Any) -> list[tuple[float, ...]]:
    """(Muon's lr and momentum, AdamW's lr) at each step."""
    s = Session(mesh, AHEAD)
    s.start(make_gpt(depth=1))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(s.opt, max_lr=[0.02, 0.001], total_steps=6)
    seen = []
    muon, adamw = s.opt.param_groups
    for step in range(5):
        seen.append((muon["lr"], muon["momentum"], adamw["lr"]))
        s.train(step)
        scheduler.step()
    return seen


def test_one_cycle_moves_momentum(ranks):
    for seen in ranks.run(one_cycle, (2, 2)):
        for place, name in enumerate(("lr", "momentum", "AdamW's lr")):
            assert len({row[place] for row in seen}) > 1, name


def closure_and_hooks(s: Session) -> None:
    s.start(make_gpt(depth=2))
    calls: list[str] = []
    if not s.reference:
        s.opt.register_step_pre_hook(lambda *_: calls.append("before"))
        s.opt.register_step_post_hook(lambda *_: calls.append("after"))

    for step in (0, 1):
        if s.reference:
            with torch.no_grad():
                s.notes.append([float(language_loss(step, s.size)(s.model, rank)) for rank in s.each_rank()])
            s.train(step)
            continue

        def closure(step: int = step) -> float:
            s.opt.zero_grad()
            loss = language_loss(step, s.size)(s.model, s.rank)
            loss.backward()
            calls.append("closure")
            return float(loss)

        s.notes.append(s.opt.step(closure))
    s.notes.append(calls)


def test_closures_and_hooks(ranks):
    *notes, (first, second, _) = check(ranks, closure_and_hooks, schedule=ON_DEMAND)
    for rank, (*losses, calls) in enumerate(notes):
        assert losses == pytest.approx([first[rank], second[rank]], rel=1e-4)
        assert calls == ["before", "closure", "after"] * 2


class _Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = make_gpt(depth=1)
        self.blocks = self.gpt.blocks
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.gpt.embedding(tokens)
        return self.gpt.head(self.gpt.norm(self.blocks[0](x) * self.scale))


def added_group(s: Session) -> None:
    """A parameter that no group has gets AdamW, with its defaults, after the first step."""
    model = _Late()
    model.scale.requires_grad_(False)
    s.start(model, units=None)
    s.train(0)
    model.scale.requires_grad_(True)
    group = {"params": [model.scale], "weight_decay": 0.0}
    if s.reference:
        s.opt.adamw.add_param_group(group)
    else:
        s.opt.add_param_group(group)
        s.notes.append((s.opt.param_groups[-1]["lr"], s.opt.param_groups[-1]["eps"]))
    s.train(1, 2)


def test_a_group_added_later_gets_adamw(ranks):
    *notes, _ = check(ranks, added_group, schedule=AHEAD)
    assert notes == [[(3e-4, 1e-8)]] * 4


def without_decay(s: Session, named: bool) -> None:
    """Norms and biases have a group of their own, which sharded and plain replicas of parameters may share."""
    model = make_gpt(depth=2)
    if s.reference:
        s.start(model)
        s.opt.adamw.param_groups[0]["params"] = [p for p in s.opt.adamw.param_groups[0]["params"] if p.ndim > 1]
        s.opt.adamw.add_param_group({"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0})
        for group in s.opt.adamw.param_groups:
            group["lr"] = 0.05  # so that decay shows
    else:
        s.start(model, adamw_groups=lambda m: [_no_decay(m, named)], muon={"adamw_lr": 0.05})
        s.notes.append([(g["algorithm"], g["weight_decay"], len(g["params"])) for g in s.opt.param_groups])
    s.train(0, 1, 2, 3)


def _no_decay(model: nn.Module, named: bool) -> dict[str, Any]:
    small = [(name, p) if named else p for name, p in model.named_parameters() if p.ndim < 2]
    return {"params": small, "weight_decay": 0.0}


@pytest.mark.parametrize(("named", "schedule"), [(False, AHEAD), (True, NO_COPY)])
def test_norms_and_biases_may_have_no_weight_decay(ranks, named, schedule):
    *notes, _ = check(ranks, without_decay, schedule=schedule, named=named)
    # 2 blocks: 4 matrices each; a norm's weight and bias and a bias each, and the last norm's.
    assert notes == [[[("muon", 0.1, 8), ("adamw", 0.1, 2), ("adamw", 0.0, 8)]]] * 4


def split_groups(s: Session) -> None:
    """Two groups of matrices with their own lr each, as a user makes them from one."""
    s.start(make_gpt(depth=2))
    if s.reference:
        s.opt.own = {n: {"lr": 0.05} for n in s.opt.matrices if "up" in n}
    else:
        group = _muon_group(s)
        named = {id(p): n for n, p in s.model.named_parameters()}
        ups = [p for p in group["params"] if "up" in named[id(p)]]
        group["params"] = [p for p in group["params"] if "up" not in named[id(p)]]
        rest = {k: v for k, v in group.items() if k != "params"}
        s.opt.add_param_group({**rest, "params": ups, "lr": 0.05})
    s.train(0, 1)


def test_groups_of_matrices_have_their_own_lr(ranks):
    check(ranks, split_groups, schedule=KEPT)


def ending_at_zero(mesh: Any, by_scheduler: bool) -> None:
    """Rates of -1e-17 of the first, as LinearLR(1, 0) rounds them, change nothing, not even themselves."""
    s = Session(mesh, AHEAD)
    s.start(make_gpt(depth=1), prepare=lambda model: nn.init.zeros_(model.blocks[0].out.weight))  # where it would show
    before, first = s.weights(), [group["lr"] for group in s.opt.param_groups]
    if by_scheduler:
        torch.optim.lr_scheduler.LambdaLR(s.opt, lambda step: -1e-17)
    else:
        for group in s.opt.param_groups:
            group["lr"] *= -1e-17
    s.train(1)
    assert [group["lr"] for group in s.opt.param_groups] == [-1e-17 * lr for lr in first]
    assert all(torch.equal(value, before[name]) for name, value in s.weights().items())
    s.opt.load_state_dict(s.opt.state_dict())
    for group in s.opt.param_groups:
        kept, group["lr"] = group["lr"], -1e-11 * max(first)
        s.backward(language_loss(2, s.size))
        with pytest.raises(ValueError, match=r"lr: expected a number in \[0, inf\), got -"):
            s.opt.step()
        group["lr"] = kept
        s.opt.zero_grad()
    s.train(3)


@pytest.mark.parametrize("by_scheduler", [True, False])
def test_a_schedule_may_end_at_0_but_for_rounding(ranks, by_scheduler):
    ranks.run(ending_at_zero, (2, 2), by_scheduler=by_scheduler)


def test_torchs_schedules_to_0_run_to_their_end():
    model = nn.Linear(4, 4)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model, lr=2e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=10)
    seen = []
    for _ in range(11):
        model(torch.ones(1, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
        seen.append(min(group["lr"] for group in opt.param_groups))
        scheduler.step()
    assert seen[-1] == pytest.approx(0.0, abs=1e-17)


def test_hooks_before_a_load_leave_the_callers_dict_alone():
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    saved = opt.state_dict()
    groups = saved["param_groups"]
    opt.register_load_state_dict_pre_hook(lambda _, state: state.update(param_groups=copy.deepcopy(groups)))
    opt.load_state_dict(saved)
    assert saved["param_groups"] is groups


def test_hooks_after_a_load_see_the_whole_state():
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    loss_of(model, batch(0)).backward()
    opt.step()
    saved, seen = opt.state_dict(), []
    opt.register_load_state_dict_post_hook(lambda opt: seen.append(opt.state_dict()))
    opt.load_state_dict(saved)
    assert unlike(seen[0]["state"], saved["state"]) == unlike(opt.state_dict()["state"], saved["state"]) == []


def test_what_users_put_into_the_state_is_saved_and_loaded():
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    matrix, vector = next(iter(opt._runtime.leaf_of)), opt.param_groups[-1]["params"][0]
    opt.state[matrix]["visits"], opt.state[vector]["visits"], opt.state["run"] = torch.ones(2), torch.ones(3), {"id": 7}
    opt.state["run", 2] = {"id": 8}
    opt.register_state_dict_pre_hook(lambda opt: opt.state[matrix].update(saves=opt.state[matrix].get("saves", 0) + 1))
    opt.register_state_dict_post_hook(lambda opt, state: {"groups": state["param_groups"][0]["algorithm"], **state})
    saved = opt.state_dict()
    assert saved.pop("groups").startswith("muon ")
    assert opt.state_dict()["state"][0]["saves"] == opt.state[matrix]["saves"] == 2
    for key in (matrix, vector, "run", ("run", 2)):
        del opt.state[key]
    opt.load_state_dict(saved)
    assert opt.state["run"] == {"id": 7} and opt.state["run", 2] == {"id": 8}
    assert opt.state[matrix]["visits"].equal(torch.ones(2)) and opt.state[vector]["visits"].equal(torch.ones(3))
    assert "momentum_buffer" in opt.state[matrix]
    saved["state"][0]["visits"] = torch.ones(2, dtype=torch.float64)
    opt.load_state_dict(saved)
    assert opt.state[matrix]["visits"].dtype == matrix.dtype  # as in torch


def test_a_load_takes_amsgrad_of_the_saved_group():
    opts = []
    for _ in range(2):
        model = make_gpt(depth=1)
        dmuon.dedicate_params(model)
        opts.append(dmuon.Muon(model))
    opts[0].param_groups[-1]["amsgrad"] = True
    loss_of(model, batch(0)).backward()
    opts[1].step()
    for source, target in (opts, opts[::-1]):
        saved = copy.deepcopy(source.state_dict())
        target.load_state_dict(saved)
        assert unlike(target.state_dict()["state"], saved["state"]) == []
        source.param_groups[-1]["amsgrad"] = False
        source.state.clear()


def removed_on_one_rank(mesh: Any, how: str) -> str:
    s = Session(mesh, AHEAD)
    s.start(make_gpt(depth=1))
    s.train(0)
    if s.rank == 1:
        first = next(iter(s.opt._runtime.leaf_of))
        s.opt.state[first] = {"momentum_buffer": torch.zeros(1)} if how == "replaced" else {}
    if how == "removed before a step":
        s.backward(language_loss(1, s.size))
    with pytest.raises(ValueError) as error:
        s.opt.step() if how == "removed before a step" else s.opt.state_dict()
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("replaced", "' was replaced"),
        ("removed", "Muon.state_dict: ranks differ"),
        ("removed before a step", "rank 1 has: the state of 'blocks.0.qkv.weight' removed"),
    ],
)
def test_a_state_that_one_rank_alone_removes_is_an_error_of_all(ranks, how, words):
    for message in ranks.run(removed_on_one_rank, (2, 2), how=how):
        assert words in message


def test_each_skipped_step_is_logged_once_and_none_again_after_a_load():
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    with logged() as messages:
        for step, scale in enumerate((math.inf, 1.0, math.inf, 1.0)):
            (loss_of(model, batch(step)) * scale).backward()
            opt.step()
            opt.zero_grad()
        saved = copy.deepcopy(opt.state_dict())
        model = make_gpt(depth=1)
        dmuon.dedicate_params(model)
        opt = dmuon.Muon(model)
        opt.load_state_dict(saved)
        for step, scale in enumerate((1.0, math.inf)):
            (loss_of(model, batch(step)) * scale).backward()
            opt.step()
            opt.zero_grad()
    skipped = [message for message in messages if "step skipped on all" in message]
    assert [message.partition("on all ")[2] for message in skipped] == ["(1 so far)", "(2 so far)", "(3 so far)"]
