"""Whatever comes between forward, backward and step: the weights are one process's."""

from __future__ import annotations

import math

import pytest
import semantics_cases as cases
import torch
from models import batch, loss_of, make_gpt
from reference import QUINTIC, ReferenceMuon
from scenario import LR, WEIGHT_DECAY, check, run_scenario


def test_evaluation_before_and_between_steps(ranks):
    *notes, reference = check(ranks, cases.evaluation)
    for note in notes:
        assert note == pytest.approx(reference, rel=1e-4)


def test_forwards_without_backward(ranks):
    check(ranks, cases.dropped_graph)


@pytest.mark.parametrize("by", ["opt", "model", "zeros"])
def test_gradients_that_are_cleared_leave_no_trace(ranks, by):
    check(ranks, cases.cleared_gradients, by=by)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("clear", [True, False])
def test_a_backward_that_raised_leaves_no_trace(ranks, first, clear):
    check(ranks, cases.raised_backward, first=first, clear=clear)


@pytest.mark.parametrize("without", [(1,), (0, 2, 3), (0, 1, 2, 3)])
def test_a_missing_gradient_is_zero_on_some_ranks_and_nothing_on_all(ranks, without):
    *notes, reference = check(ranks, cases.missing_gradients, ranks=without)
    owners = [note for note in notes if note[0] is not None]
    assert len(owners) == 1
    for got, expected in zip(owners[0], reference, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-7)
    if len(without) == 4:
        # Three steps, of which the matrix took part in the first alone.
        assert torch.equal(owners[0][0], owners[0][1])


def test_requires_grad_may_change_between_steps(ranks):
    check(ranks, cases.toggled_requires_grad)


def test_two_backwards_through_one_graph_add(ranks):
    check(ranks, cases.two_backwards)


def test_autograd_grad_of_the_input_alone(ranks):
    *notes, reference = check(ranks, cases.gradient_of_the_input)
    for note in notes:
        for got, expected in zip(note, reference, strict=True):
            assert torch.allclose(got, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["blocks.1", "head"])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(ranks, value, where):
    *notes, _ = check(ranks, cases.non_finite, value=value, where=where)
    for (skipped, norm, unchanged), skipped_at_end in notes:
        assert (skipped, skipped_at_end, unchanged) == (1, 1, True)
        assert math.isnan(norm)


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("mesh", [(2, 2), (4,)])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_clipping_equals_torch_on_one_process(ranks, mesh, max_norm, units):
    *notes, reference = check(ranks, cases.clipped, mesh, max_norm=max_norm, units=units)
    for note in notes:
        assert note == pytest.approx(reference, rel=1e-4)


@pytest.mark.parametrize("mesh", [(2, 2), (3,)])
def test_two_runs_are_bitwise_equal(ranks, mesh):
    assert ranks.run(cases.identical, mesh) == [[]] * torch.Size(mesh).numel()


def _torch_muon(steps: int):
    """torch.optim.Muon, whose iteration is bf16 with the quintic, on one process."""
    model = make_gpt(depth=1)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
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
    names = [n for n, p in model.named_parameters() if p.ndim == 2 and "blocks" in n]
    exact = ReferenceMuon(model, names, LR, WEIGHT_DECAY, rows=QUINTIC)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        exact.step()
        exact.zero_grad()
    reference = dict(model.named_parameters())
    theirs = _torch_muon(3)
    results = ranks.run(run_scenario, (2, 2), module=cases.__name__, name="bf16_quintic")
    for initial, ours, _ in results:
        for name in names:
            moved = (reference[name] - initial[name]).norm()
            torch_error = (theirs[name] - reference[name]).norm() / moved
            error = (ours[name] - reference[name]).norm() / moved
            assert error <= 2 * torch_error, f"{name}: {error:.2e}, torch.optim.Muon {torch_error:.2e}"
            assert torch_error < 0.1


@pytest.mark.parametrize("add", [True, False])
def test_a_layer_that_is_unfrozen_after_set_up_is_not_left_out_in_silence(ranks, add):
    first, *others = ranks.run(cases.warnings_of_unfrozen, (2,), add=add)
    names = {name for name, _ in make_gpt(depth=2).named_parameters() if name.startswith("blocks.1.")}
    assert {message.split("'")[1] for message in first} == (set() if add else names)
    assert len(first) == (0 if add else len(names))  # once each
    assert others == [[]]
