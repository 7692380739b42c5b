"""Weights equal a single process where models use their modules in unusual ways."""

from __future__ import annotations

import math

import composition_cases as cases
import pytest
import torch
from scenario import assert_equal_to_reference, check, run_scenario


def test_a_block_called_twice_in_one_forward(ranks):
    check(ranks, cases.called_twice)


def test_gradients_of_micro_steps_add(ranks):
    check(ranks, cases.micro_steps)


def test_mixed_precision_stays_near_fp32(ranks):
    """bf16 rounds weights and activations to 2^-9; a gradient is then off by about 2^-7 of its norm, and
    orthogonalisation may turn small singular directions: one tenth of the path is a bound that a wrong
    mean, a lost matrix or bf16 master weights break."""
    *notes, _ = check(ranks, cases.mixed_precision, bound=0.1, among=r"(qkv|out|up|down)\.weight")
    for *losses, dtypes, state_dtypes in notes:
        assert all(math.isfinite(loss) for loss in losses)
        assert dtypes == {torch.float32}
        assert state_dtypes <= {"torch.float32"}


def test_a_matrix_tied_across_units_belongs_to_their_ancestor(ranks):
    *notes, _ = check(ranks, cases.tied_across_units)
    assert notes == [[("", "blocks.0")]] * 4


def test_a_matrix_tied_inside_a_unit_stays_tied(ranks):
    *notes, _ = check(ranks, cases.tied_inside_a_unit)
    assert notes == [[True]] * 4


def test_units_inside_units(ranks):
    check(ranks, cases.nested_units)


@pytest.mark.parametrize("kind", list(cases._WRAPPERS))
def test_structures_as_inputs_and_outputs(ranks, kind):
    check(ranks, cases.structures, kind=kind)


@pytest.mark.parametrize("mesh", [(2, 2), (4,)])
def test_plain_replicas(ranks, mesh):
    check(ranks, cases.plain_replicas, mesh)


@pytest.mark.parametrize("fsdp", [True, False])
@pytest.mark.parametrize("sizes", [[10, 1], [10, 7, 1]])
def test_fewer_matrices_than_ranks_and_nothing_else(ranks, sizes, fsdp):
    check(ranks, cases.only_matrices, sizes=sizes, fsdp=fsdp)


def test_no_matrices(ranks):
    *notes, reference = check(ranks, cases.no_matrices)
    for note in notes:
        assert note == pytest.approx(reference, rel=1e-5)


def test_two_models_trained_in_turn(ranks):
    *notes, reference = check(ranks, cases.two_models)
    for note in notes:
        assert_equal_to_reference(*reference[0], note[0][1])


SKIPS = {
    "one rank, one unit": {1: {1: (2,)}},
    "one rank, all units": {1: {1: (0, 1, 2, 3)}, 3: {0: (0, 1, 2, 3)}},
    "every rank another": {1: {r: (r,) for r in range(4)}, 2: {r: (3 - r,) for r in range(4)}},
    "all ranks": {1: {r: (1, 3) for r in range(4)}},
    "last and first": {1: {2: (3,)}, 2: {2: (0,)}},
}


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
@pytest.mark.parametrize("name", list(SKIPS))
def test_ranks_may_skip_units_after_the_first_step(ranks, mesh, name):
    check(ranks, cases.skipped_units, mesh, plan=SKIPS[name])


def test_the_reference_sees_skips():
    """A check of the check: skipping changes the weights by more than the bound."""
    module = cases.__name__
    initial, plain, _ = run_scenario(None, module, "skipped_units", 4, plan={})
    _, skipped, _ = run_scenario(None, module, "skipped_units", 4, plan=SKIPS["one rank, one unit"])
    with pytest.raises(AssertionError):
        assert_equal_to_reference(initial, plain, skipped)
