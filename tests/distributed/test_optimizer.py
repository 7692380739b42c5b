"""dmuon.Muon is a torch.optim.Optimizer: schedulers, closures, hooks and groups work as on one process."""

from __future__ import annotations

import optimizer_cases as cases
import pytest
from scenario import check


def test_hyperparameters_are_read_at_every_step(ranks):
    check(ranks, cases.changed_hyperparameters)


def test_schedulers_move_both_algorithms(ranks):
    check(ranks, cases.scheduled)


def test_one_cycle_moves_momentum(ranks):
    for seen in ranks.run(cases.one_cycle, (2, 2)):
        for place, name in enumerate(("lr", "momentum", "AdamW's lr")):
            assert len({row[place] for row in seen}) > 1, name


def test_closures_and_hooks(ranks):
    *notes, _ = check(ranks, cases.closure_and_hooks)
    for first, second, calls in notes:
        assert first != second
        assert calls == ["before", "closure", "after"] * 2


def test_a_group_added_later_gets_adamw(ranks):
    *notes, _ = check(ranks, cases.added_group)
    assert notes == [[(3e-4, 1e-8)]] * 4


def test_groups_of_matrices_have_their_own_lr(ranks):
    check(ranks, cases.split_groups)


@pytest.mark.parametrize("mesh", [(2, 2), (4,)])
def test_weights_edited_inside_full_params_are_kept(ranks, mesh):
    check(ranks, cases.edited_weights, mesh)


def test_a_state_dict_loads_inside_full_params(ranks):
    check(ranks, cases.loaded_weights)


def test_full_params_without_write_back_leaves_everything(ranks):
    *notes, _ = check(ranks, cases.untouched_by_reading)
    assert notes == [[True, True, True, True]] * 4


@pytest.mark.parametrize("mesh", [(2, 2), (4,), (2,)])
@pytest.mark.parametrize("steps", [0, 2])
def test_verify_finds_nothing_but_rounding(ranks, mesh, steps):
    for publication, routing, update, same in ranks.run(cases.verified, mesh, steps=steps, options={}):
        assert publication == 0
        assert routing < 1e-6
        assert update < 1e-3
        assert same


def test_verify_leaves_training_alone(ranks):
    check(ranks, cases.verify_leaves_training_alone)
