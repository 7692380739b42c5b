"""Gradients are summed over ranks and divided by what FSDP2 divides by: the program is one process's, norms and all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from dmuon._setup.placeholder import OwnedTensor
from models import Skips, batch, make_gpt, square_loss
from refusals import REFUSED, Refusals, dedicated, expect_refusal, messages_of, rank_of, with_gradients
from scenario import LossOf, Session, blocks_of, check
from torch.distributed.fsdp import FSDPModule
from training import AHEAD, KEPT, NO_COPY, ON_DEMAND, dedicate, shard

import dmuon

refused = Refusals()


def tell(model: nn.Module, factor: float) -> None:
    """As torchtitan does; gloo cannot divide within a sum by what is no number of ranks."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)


def of_global_tokens(step: int, size: int) -> LossOf:
    """The sum of a rank's losses by the tokens of all ranks; the part of rank r lacks r tokens of each row."""
    parts = [part[:, : part.shape[1] - rank] for rank, part in enumerate(batch(step).chunk(size))]
    num_tokens = sum(part[:, 1:].numel() for part in parts)

    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        logits, targets = model(parts[rank][:, :-1]).flatten(0, 1), parts[rank][:, 1:].flatten()
        return F.cross_entropy(logits.float(), targets, reduction="sum") / num_tokens

    return loss


def momenta(s: Session) -> dict[str, torch.Tensor]:
    """Of the matrices that this rank owns."""
    if s.reference:
        return {name: buffer.clone() for name, buffer in s.opt.buffers.items()}
    held = {name: s.opt.state.get(p, {}).get("momentum_buffer") for name, p in s.model.named_parameters()}
    return {name: b.clone() for name, b in held.items() if b is not None and not isinstance(b, OwnedTensor)}


def sums_of_losses(s: Session, factor: float, units: Any, max_norm: float) -> None:
    model = s.start(make_gpt(depth=2), units=units, options={"gradient_divide_factor": factor})
    tell(model, factor)
    scale = s.size / factor if s.reference else 1.0  # a session's reference takes the mean
    for step in range(3):
        for micro in range(2):
            if s.reference or micro == 1:
                s.backward(of_global_tokens(2 * step + micro, s.size), scale)
            else:
                with dmuon.no_sync(model):
                    s.backward(of_global_tokens(2 * step, s.size), scale)
        s.clip(max_norm)
        if step == 1:  # what is added to clipped gradients has the same size
            s.backward(of_global_tokens(9, s.size), scale)
            s.clip(max_norm)
        s.step()
    s.notes.append(momenta(s))


# Every two of a mesh with its schedule, units, and a factor meet once at least.
@pytest.mark.parametrize(
    ("mesh", "schedule", "units", "factor", "max_norm"),
    [
        ((4,), AHEAD, blocks_of, 1.0, 0.3),
        ((4,), AHEAD, None, 3, 1e4),
        ((2, 2), NO_COPY, blocks_of, 3, 1e4),
        ((2, 2), NO_COPY, None, 1.0, 0.3),
        ((2, 2), KEPT, blocks_of, 1.0, 0.3),
        ((2, 2), KEPT, None, 3, 1e4),
    ],
)
def test_the_program_is_that_of_one_process(ranks, mesh, schedule, units, factor, max_norm):
    *notes, reference = check(
        ranks, sums_of_losses, mesh, schedule=schedule, factor=factor, units=units, max_norm=max_norm
    )
    seen = set()
    for *norms, buffers in notes:
        assert norms == pytest.approx(reference[:-1], rel=1e-4)
        for name, buffer in buffers.items():
            assert torch.allclose(buffer, reference[-1][name], rtol=1e-3, atol=1e-6), name
        seen |= buffers.keys()
    assert seen == reference[-1].keys()


def with_torch_s_functions(s: Session) -> None:
    """GradScaler and torch's clipping, on gradients of a sum; layers are frozen and trained again."""
    model = s.start(make_gpt(depth=2), options={"gradient_divide_factor": 1.0})
    tell(model, 1.0)
    scaler = None if s.reference else torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        model.blocks[0].up.weight.requires_grad_(step != 1)
        loss = of_global_tokens(step, s.size)
        if scaler is None:
            s.backward(loss, s.size)
        else:
            scaler.scale(loss(model, s.rank)).backward()
            scaler.unscale_(s.opt)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        s.notes.append(float(norm if s.reference else norm.full_tensor()))
        if scaler is None:
            s.opt.step()
        else:
            scaler.step(s.opt)
            scaler.update()
        s.opt.zero_grad()


def test_torch_s_scaling_and_clipping_see_the_sums(ranks):
    *notes, reference = check(ranks, with_torch_s_functions, schedule=ON_DEMAND)
    for note in notes:
        assert note == pytest.approx(reference, rel=1e-4)


def given_later(s: Session) -> None:
    """A layer that is frozen at set-up and no fully_shard manages is given to AdamW after a step."""
    torch.manual_seed(0)
    model = s.start(Skips(), units=None, options={"gradient_divide_factor": 1.0}, prepare=freeze_the_head)
    for step in range(3):
        if step == 1:
            model.head.requires_grad_(True)
            if s.reference:
                s.opt.adamw.add_param_group({"params": list(model.head.parameters())})
            else:
                s.opt.add_param_group({"params": list(model.head.parameters())})
        s.backward(square_loss(step), s.size if s.reference else 1.0)
        s.clip(0.3)
        s.step()


def freeze_the_head(model: nn.Module) -> None:
    model.head.requires_grad_(False)


def test_what_adamw_is_given_later_is_summed_too(ranks):
    *notes, reference = check(ranks, given_later, schedule=AHEAD)
    for note in notes:
        assert note == pytest.approx(reference, rel=1e-4)


def quotient_of_norms(mesh: Any, factor: float) -> float:
    """The norm of a gradient without the factor, by the norm with it."""
    norms = []
    for told in (None, factor):
        model = make_gpt(depth=1)
        dedicate(model, mesh, AHEAD, gradient_divide_factor=told)
        dmuon.Muon(model)
        model(batch(0)).square().sum().backward()
        norms.append(float(dmuon.clip_grad_norm_(model, 1e9)))
    return norms[0] / norms[1]


def test_one_rank_alone_divides_too(ranks):
    assert ranks.run(quotient_of_norms, (1,), factor=8)[0] == pytest.approx(8, rel=1e-5)


def the_number_of_ranks(s: Session) -> None:
    """Said aloud to FSDP2, or to dmuon, it is the mean as ever."""
    model = s.start(make_gpt(depth=1), options={"gradient_divide_factor": 4})
    s.train(0)
    tell(model, 4.0)
    s.train(1)


def test_a_factor_that_is_the_number_of_ranks_is_the_mean(ranks):
    check(ranks, the_number_of_ranks, schedule=AHEAD)


@refused("'(root)'", "by 1, and dmuon those of matrices by 4", "gradient_divide_factor=1)")
def told_before_muon(mesh: Any) -> None:
    model = dedicated(mesh)
    shard(model, mesh)
    tell(model, 1.0)
    dmuon.Muon(model)


@refused("'(root)'", "by 1, and dmuon those of matrices by 4", where="", clips=True)
@refused("'blocks.1'", "by 2.5, and dmuon those of matrices by 4", where="blocks.1", clips=False)
def told_before_the_step(mesh: Any, where: str, clips: bool) -> None:
    model, opt = with_gradients(mesh)
    model.get_submodule(where).set_gradient_divide_factor(2.5 if where else 1.0)
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        opt.step()


@refused("'(root)'", "by 4, and dmuon those of matrices by 1", "set_gradient_divide_factor(1) on every module")
def dmuon_alone_is_told(mesh: Any) -> None:
    s = Session(mesh, AHEAD)
    s.start(make_gpt(depth=1), options={"gradient_divide_factor": 1.0})
    s.train(0)


@refused("gradient_divide_factor: expected a positive number that fp32 can hold, or None, got 1e-300", factor=1e-300)
@refused("gradient_divide_factor: expected a positive number that fp32 can hold, or None, got 0", factor=0)
@refused("gradient_divide_factor: expected a positive number that fp32 can hold, or None, got -1.0", factor=-1.0)
@refused("gradient_divide_factor: expected a positive number that fp32 can hold, or None, got inf", factor=math.inf)
@refused("gradient_divide_factor: expected a positive number that fp32 can hold, or None, got nan", factor=math.nan)
@refused("gradient_divide_factor: expected a positive number that fp32 can hold, or None, got True", factor=True)
@refused("gradient_divide_factor: expected a positive number that fp32 can hold, or None, got '1'", factor="1")
def no_factor(mesh: Any, factor: Any) -> None:
    dedicated(mesh, gradient_divide_factor=factor)


@refused("ranks differ", "gradient_divide_factor=1.0", "rank 1 has: ", "gradient_divide_factor=2.0")
def factors_differ(mesh: Any) -> None:
    dedicated(mesh, gradient_divide_factor=1.0 + (rank_of(mesh) == 1))


@pytest.mark.parametrize(REFUSED, refused)
def test_raises_on_every_rank_and_says_what_to_do(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


def one_rank_alone_is_told(mesh: Any) -> None:
    model, opt = with_gradients(mesh)
    if rank_of(mesh) == 1:
        tell(model, 1.0)
    opt.step()


def test_a_rank_that_alone_is_told_says_so_and_the_others_raise_too(ranks):
    messages = messages_of(ranks, one_rank_alone_is_told)
    assert len(messages) == 4 and all("by 1, and dmuon those of matrices by 4" in message for message in messages)
    assert [message.endswith("(on rank 1)") for message in messages] == [True, False, True, True]
