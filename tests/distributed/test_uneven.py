"""Ranks that do unlike things after the first step, and plain parameters beside sharded ones."""

from __future__ import annotations

import uneven_cases as cases
from scenario import assert_equal_to_reference, check


def test_a_rank_without_a_backward_counts_as_zeros_and_hangs_nobody(ranks):
    check(ranks, cases.a_rank_without_a_backward)


def test_a_unit_skipped_in_one_model_does_not_disturb_another(ranks):
    *notes, reference = check(ranks, cases.two_models_of_which_a_rank_skips_a_unit)
    for ((initial, expected),), ((_, got),) in [(reference, note) for note in notes]:
        assert_equal_to_reference(initial, expected, got)


def test_plain_parameters_beside_sharded_ones(ranks):
    check(ranks, cases.only_blocks_sharded)
