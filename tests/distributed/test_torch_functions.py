"""torch's own clipping and loss scaling, and hooks of its optimizers, beside a single process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Heads, heads_gpt, make_gpt
from refusals import REFUSED, Refusals, expect_refusal
from scenario import LossOf, Session, check, language_loss
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from training import AHEAD, FAR_AHEAD, KEPT, NO_COPY, REPLICATED

import dmuon


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def number(norm: torch.Tensor) -> float:
    return float(whole(norm))


def clipped(s: Session, how: str) -> None:
    s.start(make_gpt(depth=2), units=None if "plain" in how else lambda model: list(model.blocks))
    for step in range(3):
        s.backward(language_loss(step, s.size))
        parameters = list(s.model.parameters())
        foreach = True if "foreach" in how else None
        if "clip_grad_norm_" in how:
            norm = nn.utils.clip_grad_norm_(parameters, 0.3, foreach=foreach)
        else:
            gradients = [p.grad for p in parameters if p.grad is not None]
            if "scaled" in how:
                torch._foreach_mul_(gradients, 0.5)
                torch._foreach_div_(gradients, [0.5] * len(gradients))
            norm = nn.utils.get_total_norm(gradients, foreach=foreach)
            if isinstance(norm, DTensor) and foreach:  # as torchtitan
                norm = norm.full_tensor()
            nn.utils.clip_grads_with_norm_(parameters, 0.3, norm, foreach=foreach)
        s.notes.append(number(norm))
        if not s.reference:
            s.notes.append(float(dmuon.clip_grad_norm_(s.model, math.inf)))
        s.step()


@pytest.mark.parametrize(
    ("mesh", "schedule", "how"),
    [
        ((2, 2), AHEAD, "clip_grad_norm_"),
        ((2, 2), AHEAD, "get_total_norm"),
        ((4,), KEPT, "clip_grad_norm_"),
        ((3,), NO_COPY, "get_total_norm"),
        ((2, 2), AHEAD, "clip_grad_norm_, foreach"),
        ((1, 4), KEPT, "get_total_norm, foreach"),
        ((2, 2), NO_COPY, "get_total_norm, foreach, scaled"),
        ((4,), AHEAD, "clip_grad_norm_, foreach"),
        ((1,), AHEAD, "get_total_norm, foreach, scaled, plain"),
        ((2, 2), REPLICATED, "clip_grad_norm_, plain"),
        ((4,), AHEAD, "get_total_norm, foreach, plain"),
    ],
)
def test_torchs_clipping_includes_owned_matrices(ranks, mesh, schedule, how):
    *notes, expected = check(ranks, clipped, mesh, schedule=schedule, how=how)
    for norms in notes:
        assert norms[::2] == pytest.approx(expected, rel=1e-4)
        assert norms[1::2] == pytest.approx([min(0.3, norm) for norm in expected], rel=1e-4)


refused = Refusals()


@refused("_foreach_add_", "dmuon.clip_grad_norm_", fsdp=True)
@refused("_foreach_add_", "dmuon.clip_grad_norm_", fsdp=False)
def foreach_functions(mesh: Any, fsdp: bool) -> None:
    s = Session(mesh, AHEAD)
    s.start(make_gpt(depth=1), **({} if fsdp else {"units": None}))
    s.backward(language_loss(0, s.size))
    gradients = [p.grad for p in s.model.parameters()]
    before = whole(gradients[0])
    try:
        torch._foreach_add_(gradients, 1.0)
    finally:
        assert torch.equal(whole(gradients[0]), before)  # refused before anything has changed


@refused("a norm of torch's with parameters of which fully_shard manages some and others not", "dmuon.clip_grad_norm_")
def clipped_beside_plain_parameters(mesh: Any) -> None:
    model = make_gpt(depth=1)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    s = Session(mesh, AHEAD)
    s.start(model, units=None)
    s.backward(language_loss(0, s.size))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize(REFUSED, refused)
def test_other_foreach_functions_are_refused(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


def some_clipped(s: Session) -> None:
    """Two halves by themselves, as recipes for adapters do."""
    s.start(make_gpt(depth=2))
    for step in range(3):
        s.backward(language_loss(step, s.size))
        for block in s.model.blocks:
            s.notes.append(number(nn.utils.clip_grad_norm_(block.parameters(), 0.1)))
        s.step()


def clipped_after_another_has_left(s: Session) -> None:
    s.start(make_gpt(depth=2))
    extra = nn.Parameter(torch.ones(3))
    if not s.reference:
        s.opt.add_param_group({"params": [extra]})
    s.train(0)
    if not s.reference:
        s.opt.param_groups.pop()
        s.opt.state.pop(extra, None)
    s.train(1)
    s.backward(language_loss(2, s.size))
    s.notes.append(number(nn.utils.clip_grad_norm_(s.model.parameters(), 0.3)))
    s.step()


def test_torchs_clipping_does_not_mind_parameters_that_have_left(ranks):
    *notes, expected = check(ranks, clipped_after_another_has_left, schedule=AHEAD)
    assert [note == pytest.approx(expected, rel=1e-4) for note in notes] == [True] * len(notes)


def test_a_part_of_a_model_is_clipped_by_itself(ranks):
    *notes, expected = check(ranks, some_clipped, schedule=FAR_AHEAD)
    for norms in notes:
        assert norms == pytest.approx(expected, rel=1e-4)


def scale_gradients(parameters: list[Any], how: str) -> None:
    """By a quarter, as programs do who sum over micro-batches or tokens."""
    gradients = [p.grad for p in parameters]
    if how == "mul_":
        for p in parameters:
            p.grad.mul_(0.25)
    elif how == "div_":
        for p in parameters:
            p.grad.div_(4)
    elif how == "*=":
        for p in parameters:
            p.grad *= torch.tensor(0.25)
    elif how == "/=":
        for p in parameters:
            p.grad /= torch.tensor([4])
    else:
        matrices = [g for g, p in zip(gradients, parameters, strict=True) if not isinstance(p, DTensor)]
        others = [g for g, p in zip(gradients, parameters, strict=True) if isinstance(p, DTensor)]
        for together in filter(None, (matrices, others)):
            if how == "_foreach_mul_":
                torch._foreach_mul_(together, torch.tensor(0.5))
                torch._foreach_mul_(together, 0.5)
            else:
                torch._foreach_div_(together, torch.tensor(2.0))
                torch._foreach_div_(together, [2.0] * len(together))


def scaled_by_hand(s: Session, how: str, fsdp: bool) -> None:
    """Clipping between two scalings sees the gradients of that moment."""
    s.start(make_gpt(depth=2), **({} if fsdp else {"units": None}))
    for step in range(3):
        s.backward(language_loss(step, s.size), scale=16)
        scale_gradients(list(s.model.parameters()), how)
        s.clip(1.0)
        s.clip(math.inf)
        scale_gradients(list(s.model.parameters()), how)
        s.clip(math.inf)
        s.step()


# Beside FSDP2, whose gradients are DTensors, and on plain replicas.
@pytest.mark.parametrize(
    ("mesh", "schedule", "fsdp", "how"),
    [
        *(((2, 2), AHEAD, True, how) for how in ("mul_", "/=", "_foreach_mul_", "_foreach_div_")),
        *(((4,), KEPT, False, how) for how in ("div_", "*=")),
    ],
)
def test_gradients_scaled_by_a_number_are_scaled_at_their_owners(ranks, mesh, schedule, fsdp, how):
    *notes, expected = check(ranks, scaled_by_hand, mesh, schedule=schedule, how=how, fsdp=fsdp)
    for norms in notes:
        assert norms == pytest.approx(expected, rel=1e-4)


OVERFLOWS = 3


def scaled(s: Session, fsdp: bool, clips: bool, heads: bool, extra: bool) -> None:
    """Loss scaling by powers of two changes nothing; where a gradient overflows on one rank, all leave the step out.

    Of the `extra` parameter, which fully_shard does not manage, rank 2 has no gradient until the scaler looks at all.
    """
    model = heads_gpt() if heads else make_gpt(depth=2)
    if extra and not fsdp:
        model.extra = nn.Parameter(torch.linspace(1, 2, 6))
    of_heads = [name for name, module in model.named_modules() if isinstance(module, Heads)]
    cuts = {f"{name}.weight": lambda p: list(p.split(8)) for name in of_heads}
    several = {"muon": {"cuts": cuts}} if s.reference else {"options": {"strategy": "round_robin"}}
    s.start(model, **(several if heads else {}), **({} if fsdp else {"units": None}))
    if heads and not s.reference:
        assert any(isinstance(row.owner, tuple) for row in dmuon.routing_table(model))
    if extra and fsdp:
        model.extra = nn.Parameter(torch.linspace(1, 2, 6))
        adamw = s.opt.adamw if s.reference else s.opt
        adamw.add_param_group({"params": [model.extra], "lr": 1e-2, "weight_decay": 0.0})
        s.initial["extra"] = model.extra.detach().clone()
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**12, growth_interval=2)
    for step in range(6):
        loss = language_loss(step, s.size)

        def of_extra(model: nn.Module, rank: int) -> torch.Tensor | None:
            value = None if not extra or rank == 2 else (1 + step) * model.extra.square().sum()  # noqa: B023
            return value if value is None or s.reference else scaler.scale(value)

        if s.reference:
            if step != OVERFLOWS:
                s.backward(loss)
                s.backward(of_extra)
                if clips:
                    s.clip(0.5)
                s.step()
            continue

        def scaled_loss(model: nn.Module, rank: int, loss: LossOf = loss, step: int = step) -> torch.Tensor:
            value = scaler.scale(loss(model, rank))
            return value * math.inf if (step, rank) == (OVERFLOWS, 1) else value

        s.backward(scaled_loss)
        s.backward(of_extra)
        if clips:
            scaler.unscale_(s.opt)
            dmuon.clip_grad_norm_(s.model, 0.5)
        scaler.step(s.opt)
        scaler.update()
        s.opt.zero_grad()
        s.notes.append(scaler.get_scale() / 2**12)


@pytest.mark.parametrize(
    ("mesh", "fsdp", "heads", "clips", "extra"),
    [
        ((2, 2), True, False, True, False),
        ((2, 2), True, False, True, True),
        ((2, 2), True, True, False, False),
        ((2, 2), False, False, False, True),
        ((4,), True, False, False, True),
        ((4,), False, True, True, True),
    ],
)
def test_a_scaled_loss_trains_as_one_that_is_not(ranks, mesh, fsdp, heads, clips, extra):
    *notes, _ = check(ranks, scaled, mesh, schedule=NO_COPY, fsdp=fsdp, heads=heads, clips=clips, extra=extra)
    assert notes == [[1, 2, 2, 1, 1, 2]] * 4


def hooked(mesh: Any) -> list[str]:
    s = Session(mesh, AHEAD)
    s.start(make_gpt(depth=1))
    calls: list[str] = []
    s.opt.register_step_pre_hook(lambda *_: calls.append("before step"))
    s.opt.register_step_post_hook(lambda *_: calls.append("after step"))
    s.opt.register_state_dict_pre_hook(lambda *_: calls.append("before state_dict"))
    s.opt.register_state_dict_post_hook(lambda *_: calls.append("after state_dict"))
    s.opt.register_load_state_dict_pre_hook(lambda *_: calls.append("before load"))
    s.opt.register_load_state_dict_post_hook(lambda *_: calls.append("after load"))
    everywhere = [
        register_optimizer_step_pre_hook(lambda opt, *_: calls.append(f"before any step: {type(opt).__name__}")),
        register_optimizer_step_post_hook(lambda opt, *_: calls.append(f"after any step: {type(opt).__name__}")),
    ]
    s.train(0)
    s.opt.load_state_dict(s.opt.state_dict())
    s.train(1)
    for hook in everywhere:
        hook.remove()
    return calls


def test_hooks_of_torchs_optimizers_run_once_each(ranks):
    step, save, load = (["before " + what, "after " + what] for what in ("step", "state_dict", "load"))
    step = ["before any step: Muon", *step, "after any step: Muon"]
    assert ranks.run(hooked, (2, 2)) == [[*step, *save, *load, *step]] * 4
