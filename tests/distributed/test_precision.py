"""How exact dmuon is: bit by bit repeatable, near fp32 in mixed precision, as exact as torch.optim.Muon in bf16."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import batch, is_matrix_of_a_block, loss_of, make_gpt
from reference import QUINTIC, ReferenceMuon
from refusals import expect_refusal
from scenario import Session, check, language_loss, run_scenario
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import AHEAD, FAR_AHEAD, KEPT, LR, NO_COPY, REPLICATED, WEIGHT_DECAY

import dmuon


def identical(mesh: Any, schedule: dict[str, Any]) -> dict[str, bool]:
    """Of each weight, whether two runs in one process gave the same bits."""
    runs = []
    for _ in range(2):
        s = Session(mesh, schedule)
        s.start(make_gpt(depth=2))
        s.train(0, 1, 2)
        runs.append(s.weights())
    return {n: torch.equal(w, runs[1][n]) for n, w in runs[0].items()}


@pytest.mark.parametrize(("mesh", "schedule"), [((2, 2), FAR_AHEAD), ((3,), NO_COPY)])
def test_two_runs_are_bitwise_equal(ranks, mesh, schedule):
    names = [name for name, _ in make_gpt(depth=2).named_parameters()]
    for same in ranks.run(identical, mesh, schedule=schedule):
        assert same == dict.fromkeys(names, True)


def mixed_precision(s: Session) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = s.start(make_gpt(depth=2), mp_policy=None if s.reference else policy)
    for step in range(4):
        s.train(step)
        with torch.no_grad():
            s.notes.append(float(language_loss(step, s.size)(model, s.rank or 0)))
    if not s.reference:
        s.notes.append({p.dtype for group in s.opt.param_groups for p in group["params"]})
        states = {n: s.opt.state[p] for n, p in s.model.named_parameters() if p in s.opt.state}
        s.notes.append({n: held["momentum_buffer"].dtype for n, held in states.items() if "momentum_buffer" in held})


def test_mixed_precision_stays_near_fp32(ranks):
    """bf16 rounds weights and activations to 2^-9; a gradient is then off by about 2^-7 of its norm, and
    orthogonalisation may turn small singular directions: one tenth of the path is a bound that a wrong
    mean, a lost matrix or bf16 master weights break."""
    *notes, _ = check(ranks, mixed_precision, schedule=KEPT, bound=0.1, among=r"(qkv|out|up|down)\.weight")
    momenta = {}
    for *losses, dtypes, owned in notes:
        assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)
        assert dtypes == {torch.float32}
        momenta.update(owned)
    matrices = [n for n, p in make_gpt(depth=2).named_parameters() if is_matrix_of_a_block(n, p)]
    assert momenta == dict.fromkeys(matrices, torch.float32)


def under_autocast(s: Session, how: str = "") -> None:
    """`how` may be "compiled", or "micro-steps": two a step, and no_sync holds in the first."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = s.start(make_gpt(depth=2), units=None, mp_policy=None if s.reference else policy)

    def autocast(loss):
        def cast_loss(model, rank):
            with torch.autocast(torch.get_default_device().type, torch.bfloat16, enabled=not s.reference):
                return loss(model, rank)

        return cast_loss

    if how == "compiled" and not s.reference:
        s.model = torch.compile(model, backend="eager")
    num_micro_steps = 2 if how == "micro-steps" else 1
    for step in range(4):
        for micro in range(num_micro_steps):
            waits = micro + 1 < num_micro_steps and not s.reference
            with dmuon.no_sync(model) if waits else nullcontext():
                s.backward(autocast(language_loss(2 * step + micro, s.size)), scale=1 / num_micro_steps)
        s.step()
        with torch.no_grad():
            s.notes.append(float(autocast(language_loss(step, s.size))(model, s.rank or 0)))
    s.model = model
    if not s.reference:
        s.notes.append({p.dtype for group in s.opt.param_groups for p in group["params"]})
        s.notes.append(s.opt._runtime.engine.unit(0).weight_tensors()[0].dtype)


@pytest.mark.cpu("PyTorch has no autocast for the emulated device")
@pytest.mark.parametrize(
    ("mesh", "schedule", "how"),
    [
        ((2, 2), REPLICATED, ""),
        ((1, 4), AHEAD, ""),
        ((4, 1), NO_COPY, ""),
        ((1,), KEPT, ""),
        ((2, 2), REPLICATED, "micro-steps"),
        ((2, 2), AHEAD, "micro-steps"),
        ((2, 2), REPLICATED, "compiled"),
        ((1, 4), AHEAD, "compiled"),
    ],
)
def test_autocast_takes_the_place_of_fully_shards_casts(ranks, mesh, schedule, how):
    """Weights travel, and are multiplied, in 16 bits. The bound is that of mixed precision under fully_shard."""
    among = r"(qkv|out|up|down)\.weight"
    *notes, _ = check(ranks, under_autocast, mesh, schedule=schedule, bound=0.1, among=among, how=how)
    for *losses, dtypes, packed in notes:
        assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)
        assert dtypes == {torch.float32} and packed == torch.bfloat16


def cast_to_fp16(mesh: Any) -> None:
    model = make_gpt(depth=1)
    dmuon.dedicate_params(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    dmuon.Muon(model)
    with torch.autocast("cpu", torch.float16):
        loss_of(model, batch(0))


@pytest.mark.cpu("PyTorch has no autocast for the emulated device")
def test_autocast_to_another_dtype_is_refused(ranks):
    """Weights would be rounded to bf16 first."""
    expect_refusal(ranks, cast_to_fp16, {}, ("under autocast to torch.float16", "casts activations to torch.bfloat16"))


def bf16_quintic(s: Session) -> None:
    """As torch.optim.Muon has it."""
    s.start(make_gpt(depth=1), muon={"ns_coefficients": "quintic", "ns_dtype": torch.bfloat16})
    s.train(0, 1, 2)


def _torch_muon(steps: int):
    """torch.optim.Muon, whose iteration is bf16 with the quintic, on one process."""
    model = make_gpt(depth=1)
    matrices = [p for n, p in model.named_parameters() if is_matrix_of_a_block(n, p)]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=LR, weight_decay=WEIGHT_DECAY)
    adamw = torch.optim.AdamW(rest, lr=3e-4, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    for step in range(steps):
        loss_of(model, batch(step)).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def test_the_bf16_iteration_is_as_exact_as_torch_optim_muon(ranks):
    """Distance of either to the fp32 reference; another order of products moves rounding, so up to twice."""
    model = make_gpt(depth=1)
    names = [n for n, p in model.named_parameters() if is_matrix_of_a_block(n, p)]
    exact = ReferenceMuon(model, names, LR, WEIGHT_DECAY, rows=QUINTIC)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        exact.step()
        exact.zero_grad()
    reference = dict(model.named_parameters())
    theirs = _torch_muon(3)
    for initial, ours, _ in ranks.run(run_scenario, (2, 2), scenario=bf16_quintic, schedule=AHEAD):
        for name in names:
            moved = (reference[name] - initial[name]).norm()
            torch_error = (theirs[name] - reference[name]).norm() / moved
            error = (ours[name] - reference[name]).norm() / moved
            assert error <= 2 * torch_error, f"{name}: {error:.2e}, torch.optim.Muon {torch_error:.2e}"
            assert torch_error < 0.1
