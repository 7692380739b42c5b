"""The optimizer's face: hyperparameters, schedules, closures, hooks, groups; and weights made whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from models import make_gpt
from scenario import LR, Session, language_loss

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


def one_cycle(mesh: Any) -> list[tuple[float, ...]]:
    """(Muon's lr and momentum, AdamW's lr) at each step."""
    s = Session(mesh)
    s.start(make_gpt(depth=1))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(s.opt, max_lr=[0.02, 0.001], total_steps=6)
    seen = []
    muon, adamw = s.opt.param_groups
    for step in range(5):
        seen.append((muon["lr"], muon["momentum"], adamw["lr"]))
        s.train(step)
        scheduler.step()
    return seen


def closure_and_hooks(s: Session) -> None:
    s.start(make_gpt(depth=2))
    if s.reference:
        s.train(0, 1)
        return
    calls: list[str] = []
    s.opt.register_step_pre_hook(lambda *_: calls.append("before"))
    s.opt.register_step_post_hook(lambda *_: calls.append("after"))

    for step in (0, 1):

        def closure(step: int = step) -> float:
            s.opt.zero_grad()
            loss = language_loss(step, s.size)(s.model, s.rank)
            loss.backward()
            calls.append("closure")
            return float(loss)

        s.notes.append(s.opt.step(closure))
    s.notes.append(calls)


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


def split_groups(s: Session) -> None:
    """Two groups of matrices with their own lr each, as a user makes them from one."""
    s.start(make_gpt(depth=2))
    if s.reference:
        s.opt.lrs = {n: (0.05 if "up" in n else LR) for n in s.opt.matrices}
    else:
        group = _muon_group(s)
        named = {id(p): n for n, p in s.model.named_parameters()}
        ups = [p for p in group["params"] if "up" in named[id(p)]]
        group["params"] = [p for p in group["params"] if "up" not in named[id(p)]]
        rest = {k: v for k, v in group.items() if k != "params"}
        s.opt.add_param_group({**rest, "params": ups, "lr": 0.05})
    s.train(0, 1)


def edited_weights(s: Session) -> None:
    """full_params(writeback=True) in the middle of training."""
    s.start(make_gpt(depth=2))
    s.train(0)
    with s.full(), torch.no_grad():
        s.model.blocks[0].up.weight.mul_(0.5)
        s.model.head.weight.add_(0.01)
        s.model.blocks[1].norm.bias.fill_(0.25)
    s.train(1)


def loaded_weights(s: Session) -> None:
    s.start(make_gpt(depth=2))
    s.train(0)
    with s.full():
        s.model.load_state_dict(make_gpt(seed=9, depth=2).state_dict())
    s.train(1)


def untouched_by_reading(s: Session) -> None:
    """full_params without write-back, left by an error too, changes nothing, gradients included."""
    s.start(make_gpt(depth=2))
    s.train(0)
    s.backward(language_loss(1, s.size), scale=0.5)
    if not s.reference:
        names = [n for n, _ in s.model.named_parameters()]
        kinds = [type(p) for p in s.model.parameters()]
        for writeback in (False, True):
            try:
                with dmuon.full_params(s.model, writeback=writeback), torch.no_grad():
                    s.notes.append(all(p.shape.numel() for p in s.model.parameters()))
                    for p in s.model.parameters():
                        p.zero_()
                    raise KeyError("stop")
            except KeyError:
                pass
        with dmuon.full_params(s.model):
            state = s.model.state_dict()
            s.notes.append(list(state) == names and all(type(v) is torch.Tensor for v in state.values()))
        s.notes.append([type(p) for p in s.model.parameters()] == kinds)
    s.backward(language_loss(2, s.size), scale=0.5)
    s.step()


def verified(mesh: Any, steps: int, options: dict[str, Any]) -> Any:
    s = Session(mesh)
    model = s.start(make_gpt(depth=2), dedicate=options)
    s.train(*range(steps))
    before = s.weights()
    found = dmuon.verify(model, s.opt)
    after = s.weights()
    same = all(torch.equal(before[n], after[n]) for n in before)
    return found.publication, found.routing, found.update, same


def verify_leaves_training_alone(s: Session) -> None:
    s.start(make_gpt(depth=2))
    for step in range(3):
        if not s.reference:
            dmuon.verify(s.model, s.opt)
        s.train(step)
