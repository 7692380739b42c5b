"""Where ranks differ, or one of them is wrong, all raise ValueError: nobody waits for a rank that has given up."""

from __future__ import annotations

import datetime
import gc
import time
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Skips, batch, loss_of, make_gpt
from pool import RankPool
from refusals import REFUSED, Refusals, dedicated, expect_refusal, messages_of, rank_of, ready, with_gradients
from scenario import Session
from training import AHEAD, LR, shard

import dmuon

refused = Refusals()
SETTINGS = "dmuon: clip_grad_norm_ or Muon.step: ranks differ. Expected: the same settings on every rank. Rank 0 has: "


@refused("ranks differ", "rank 1 has: ", "'blocks.1.norm.weight'")
def models_differ(mesh: Any) -> None:
    dmuon.dedicate_params(make_gpt(depth=1 + (rank_of(mesh) == 1)), mesh)


@refused("ranks differ", "torch.float32; rank 1 has: ", "torch.bfloat16")
def dtypes_differ(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model.bfloat16() if rank_of(mesh) == 1 else model, mesh)


@refused("dedicate_params: ranks differ", "'blocks.0.up.weight'", "algorithm='frozen'")
def trainable_parameters_differ(mesh: Any) -> None:
    model = make_gpt(depth=1)
    model.blocks[0].up.weight.requires_grad_(rank_of(mesh) != 1)
    dmuon.dedicate_params(model, mesh)


@refused("Rank 0 has: strategy='round_robin'; rank 1 has: strategy='rank0'")
def options_differ(mesh: Any) -> None:
    dedicated(mesh, strategy="rank0" if rank_of(mesh) == 1 else "round_robin")


@refused("ranks differ", "'lr': 0.02", "rank 1 has: ", "'lr': 0.04")
def muon_options_differ(mesh: Any) -> None:
    model = dedicated(mesh)
    shard(model, mesh)
    dmuon.Muon(model, lr=LR * (1 + rank_of(mesh)))


@refused("ranks disagree in step 1", "the use of 'blocks.0', rank 1", "the use of 'blocks.1'", "first step", skip=0)
@refused("ranks disagree in step 1", "the use of 'blocks.3', rank 1", "the end of a pass", "first step", skip=3)
def skips_in_the_first_step(mesh: Any, skip: int) -> None:
    torch.manual_seed(0)
    s = Session(mesh, AHEAD)
    s.start(Skips(), units=None)
    s.backward(lambda model, rank: model(torch.ones(2, 10), (skip,) if rank == 1 else ()).sum())
    s.step()


@refused(
    "ranks disagree in step 1",
    "the use of 'blocks.2', rank 1",
    "the use of 'blocks.1'",
    "one of them more or less often",
)
def backward_differs_in_the_first_step(mesh: Any) -> None:
    torch.manual_seed(0)
    s = Session(mesh, AHEAD)
    model = s.start(Skips(), units=None)
    if s.rank == 1:
        model.blocks[2].register_forward_hook(lambda module, args, output: output.detach())
    s.backward(lambda model, rank: model(torch.ones(2, 10)).sum())
    s.step()


@refused(
    "some ranks have cleared the gradient of 'blocks.", "others have kept it. Expected: all ranks clear it, or none"
)
def gradients_cleared_on_one_rank(mesh: Any) -> None:
    _, opt = with_gradients(mesh)
    if rank_of(mesh) == 1:
        opt.zero_grad()
    opt.step()


@refused("some ranks have cleared the gradient of 'blocks.", "others have kept it. Expected: all ranks clear it", by=0)
@refused("some ranks have cleared the gradient of 'blocks.", "others have kept it. Expected: all ranks clear it", by=1)
def gradient_of_others_cleared(mesh: Any, by: int) -> None:
    """The rank that clears it has skipped the module."""
    torch.manual_seed(0)
    s = Session(mesh, AHEAD)
    model = s.start(Skips(), units=None)
    for step in range(2):
        s.backward(lambda model, rank, step=step: model(torch.ones(2, 10), (1,) if rank == by and step else ()).sum())
        if step and s.rank == by:
            for parameter in model.blocks[1].parameters():
                parameter.grad = None
        s.step()


@refused("some ranks have cleared the gradient of 'blocks.", "others have kept it. Expected: all ranks clear it")
def gradients_of_no_sync_cleared_on_one_rank(mesh: Any) -> None:
    model, opt = ready(mesh, fsdp=False)
    with dmuon.no_sync(model):
        loss_of(model, batch(1)).backward()
    if rank_of(mesh) == 1:
        opt.zero_grad()
    opt.step()


@refused(SETTINGS + "nothing; rank 1 has: multiplying the gradient of 'blocks.0.up.weight' by 0.5")
def gradient_scaled_on_one_rank(mesh: Any) -> None:
    model, opt = with_gradients(mesh)
    if rank_of(mesh) == 1:
        model.blocks[0].up.weight.grad.mul_(0.5)
    opt.step()


@refused("ranks differ", "rank 1 has: the state of 'blocks.0.up.weight' removed", clips=False)
@refused("ranks differ", "rank 1 has: the state of 'blocks.0.up.weight' removed", clips=True)
def state_removed_on_one_rank(mesh: Any, clips: bool) -> None:
    model, opt = with_gradients(mesh)
    if rank_of(mesh) == 1:
        del opt.state[model.blocks[0].up.weight]
    if clips:
        dmuon.clip_grad_norm_(model, 0.1)
    opt.step()


@refused("dmuon: the state of 'blocks.0.up.weight' was replaced", "or `del optimizer.state[parameter]`")
def state_replaced(mesh: Any) -> None:
    model, opt = with_gradients(mesh)
    parameter = model.blocks[0].up.weight
    opt.state[parameter] = dict(opt.state[parameter])
    try:
        opt.step()
    finally:
        del opt.state[parameter]


@refused(SETTINGS + "param_groups[0]['lr'] = 0.02; rank 1 has: param_groups[0]['lr'] = 0.04")
def lr_differs_at_a_step(mesh: Any) -> None:
    _, opt = with_gradients(mesh)
    opt.param_groups[0]["lr"] *= 1 + rank_of(mesh)
    opt.step()


@refused(
    SETTINGS + "param_groups[1]['maximize'] = False; rank 1 has: ", "['maximize'] = True", key="maximize", value=True
)
@refused(SETTINGS + "param_groups[1]['amsgrad'] = False; rank 1 has: ", key="amsgrad", value=None)
def adamw_switch_differs(mesh: Any, key: str, value: bool | None) -> None:
    """None: one rank's group does not have it, of which torch's own step would raise there alone."""
    _, opt = with_gradients(mesh)
    if rank_of(mesh) == 1:
        opt.param_groups[-1][key] = value
        if value is None:
            del opt.param_groups[-1][key]
    opt.step()


@refused(SETTINGS + "clip_grad_norm_'s max_norm = 1.0; rank 1 has: clip_grad_norm_'s max_norm = 2.0")
def max_norm_differs(mesh: Any) -> None:
    model, _ = with_gradients(mesh)
    dmuon.clip_grad_norm_(model, 1.0 + rank_of(mesh))


@refused(SETTINGS + "in the last step param_groups[0]['lr'] = 0.02; rank 1 has: ", "['lr'] = 0.04")
def lr_differs_after_clipping(mesh: Any) -> None:
    """The step sends nothing then; the next one tells."""
    model, opt = with_gradients(mesh)
    dmuon.clip_grad_norm_(model, 1.0)
    lr = opt.param_groups[0]["lr"]
    opt.param_groups[0]["lr"] = lr * (1 + rank_of(mesh))
    opt.step()
    opt.param_groups[0]["lr"] = lr
    loss_of(model, batch(2)).backward()
    opt.step()


WRITTEN = "full_params: ranks differ. Expected: inside of writeback=True the same values written on every rank"


@refused(WRITTEN, "Rank 0 has: 'blocks.0.out.weight' of values with checksum", name="blocks.0.out.weight")
@refused(WRITTEN, "Rank 0 has: 'blocks.1.norm.weight' of values with checksum", name="blocks.1.norm.weight")
@refused(WRITTEN, "Rank 0 has: 'blocks.1.norm.weight' of values with checksum", name="blocks.1.norm.weight", fsdp=False)
def written_back_unlike(mesh: Any, name: str, fsdp: bool = True) -> None:
    model = with_gradients(mesh, fsdp)[0]
    with dmuon.full_params(model, writeback=True), torch.no_grad():
        if rank_of(mesh) == 0:
            model.get_parameter(name).add_(1.0)


@refused("ranks differ", "seconds=32", "seconds=33")
def timeouts_differ(mesh: Any) -> None:
    dedicated(mesh, timeout=datetime.timedelta(seconds=32 + (rank_of(mesh) == 1)))


@refused("ranks differ", "matrix of Linear", "left out in dmuon.views.by_class: Linear")
def classes_differ(mesh: Any) -> None:
    known = dict(dmuon.views.by_class)
    try:
        if rank_of(mesh) == 1:
            dmuon.views.by_class[torch.nn.Linear] = {}
        dedicated(mesh)
    finally:
        dmuon.views.by_class.update(known)


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


def select_fails_on_one_rank(mesh: Any) -> None:
    dedicated(mesh, select=lambda *_: "muon" if rank_of(mesh) == 1 else None)


def timeout_wrong_on_one_rank(mesh: Any) -> None:
    dedicated(mesh, timeout=5 if rank_of(mesh) == 1 else datetime.timedelta(seconds=31))


def no_model_on_one_rank(mesh: Any) -> None:
    dmuon.dedicate_params([] if rank_of(mesh) == 1 else make_gpt(depth=1), mesh)


def module_replaced_on_one_rank(mesh: Any) -> None:
    model = dedicated(mesh)
    if rank_of(mesh) == 1:
        model.blocks[0].up = nn.Linear(24, 41)
    dmuon.Muon(model)


def muon_option_wrong_on_one_rank(mesh: Any) -> None:
    model = dedicated(mesh)
    shard(model, mesh)
    dmuon.Muon(model, momentum=2.0 if rank_of(mesh) == 1 else 0.95)


def lr_wrong_on_one_rank(mesh: Any) -> None:
    _, opt = with_gradients(mesh)
    if rank_of(mesh) == 1:
        opt.param_groups[0]["lr"] = -1.0
    opt.step()


def key_missing_on_one_rank(mesh: Any, number: int, key: str) -> None:
    _, opt = with_gradients(mesh)
    if rank_of(mesh) == 1:
        del opt.param_groups[number][key]
    opt.step()


def max_norm_wrong_on_one_rank(mesh: Any, wrong: Any) -> None:
    model, _ = with_gradients(mesh)
    dmuon.clip_grad_norm_(model, wrong if rank_of(mesh) == 1 else 1.0)


def classes_wrong_on_one_rank(mesh: Any) -> None:
    if rank_of(mesh) == 1:
        dmuon.views.by_class[Unused] = [1]
    try:
        dedicated(mesh)
    finally:
        dmuon.views.by_class.pop(Unused, None)


class Unused:
    pass


ON_RANK_1 = "(on rank 1)"


@pytest.mark.parametrize(
    ("program", "options", "own", "elsewhere"),
    [
        (classes_wrong_on_one_rank, {}, "dedicate_params: views.by_class: expected a class of modules", ON_RANK_1),
        (
            select_fails_on_one_rank,
            {},
            "a dmuon.View, several of them or None for 'embedding.weight', got 'muon'",
            ON_RANK_1,
        ),
        (timeout_wrong_on_one_rank, {}, "expected a positive datetime.timedelta or None, got 5", ON_RANK_1),
        (no_model_on_one_rank, {}, "expected a torch.nn.Module, got list", ON_RANK_1),
        (module_replaced_on_one_rank, {}, "'blocks.0.up.weight' or its module was replaced", ON_RANK_1),
        (muon_option_wrong_on_one_rank, {}, "momentum: expected a number in [0, 1), got 2", ON_RANK_1),
        (lr_wrong_on_one_rank, {}, "lr: expected a number in [0, inf), got -1", ON_RANK_1),
        (
            key_missing_on_one_rank,
            {"number": 0, "key": "momentum"},
            "param_groups[0]: expected a group with 'mom",
            ON_RANK_1,
        ),
        (
            key_missing_on_one_rank,
            {"number": 1, "key": "algorithm"},
            "[1]: expected a group with 'algorithm'",
            ON_RANK_1,
        ),
        (max_norm_wrong_on_one_rank, {"wrong": -1.0}, "max_norm: expected a positive number, got -1.0", ON_RANK_1),
        (
            max_norm_wrong_on_one_rank,
            {"wrong": torch.ones(2)},
            "positive number, got a Tensor of shape (2,)",
            ON_RANK_1,
        ),
    ],
)
def test_a_rank_that_is_wrong_says_what_and_the_others_raise_too(ranks, program, options, own, elsewhere):
    messages = messages_of(ranks, program, **options)
    wrong = messages.pop(1)
    assert own in wrong and elsewhere not in wrong
    assert len(messages) == 3
    for message in messages:
        assert own in message and elsewhere in message


class Unrolled(nn.Module):
    """Reads the linears of its blocks and calls no block. It may come to one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(10, 12), nn.Linear(12, 10)) for _ in range(3))

    def forward(self, x: torch.Tensor, twice: int | None = None) -> torch.Tensor:
        for index, (up, down) in enumerate(self.blocks):
            for _ in range(1 + (index == twice)):
                x = x + down(torch.tanh(up(x)))
        return x


def goes_on_anew(mesh: Any, at: int, fsdp: bool) -> float:
    """Returns the seconds from the step in which ranks disagree to the end of another model's training."""

    def train(disagrees: bool) -> None:
        s = Session(mesh, AHEAD)
        s.start(Unrolled(), units=None if not fsdp else no_units)
        for step in range(2):
            twice = s.rank if disagrees and step == at else None
            s.backward(lambda model, rank, twice=twice: model(torch.ones(2, 10), twice).sum())
            s.step()

    with pytest.raises(ValueError, match="ranks disagree"):
        train(disagrees=True)
    gc.collect()
    begun = time.monotonic()
    train(disagrees=False)
    return time.monotonic() - begun


def no_units(model: nn.Module) -> list[nn.Module]:
    return []


@pytest.mark.cpu("on devices new processes go on")
@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("at", [0, 1])
def test_after_a_disagreement_the_ranks_may_go_on_with_a_new_model(at, fsdp):
    pool = RankPool(2)
    try:
        assert max(pool.run(goes_on_anew, (2,), at=at, fsdp=fsdp)) < 60, "the timeout of a group is 300 s"
    finally:
        pool.close()
