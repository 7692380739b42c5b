"""The tuner takes what is fastest and exact, within its budget, on a machine whose times a test chooses."""

from __future__ import annotations

import itertools
import random

import numpy
import pytest
import torch
from dmuon._planning import tuning
from dmuon._planning.choices import cached
from tuning_machine import ROWS, SETTING, WIDE, tuned

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_fastest_choice_is_taken_and_kept(machine):
    machine.seconds = {("DIRECT", True): 0.9e-3, ("DIRECT", False): 0.5e-3, ("GRAM", False): 0.7e-3}
    result = tuned()
    assert (result.form, result.batched, result.default_form, result.default_batched) == ("DIRECT", False, "GRAM", True)
    assert (result.ns, result.default_ns, result.ratio) == (500_000, 1_000_000, pytest.approx(0.5))
    assert 0 < result.error < 1e-4 and 0 < result.default_error < 1e-4
    assert cached(SETTING) == {(24, 96): result}


def test_the_fastest_panels_of_the_default_are_taken(machine):
    machine.seconds = {("DIRECT", False, 64): 1e-3, ("DIRECT", False, 128): 0.8e-3, ("DIRECT", False, 256): 0.9e-3}
    result = tuned((1, 256, 256))
    assert (result.form, result.panel_rows) == ("DIRECT", 128)
    assert (result.default_form, result.default_panel_rows) == ("DIRECT", 64)
    assert (result.ratio, cached(SETTING)) == (pytest.approx(0.8), {(256, 256): result})


@pytest.mark.parametrize("share", [0.975, 1.0, 1.5])
def test_what_is_not_faster_by_three_percent_leaves_the_default(machine, share):
    machine.seconds = {("DIRECT", True): share * 1e-3}
    result = tuned()
    assert (result.form, result.batched, result.ratio) == ("GRAM", True, 1.0)
    assert result.ns == result.default_ns == 1_000_000


def test_what_is_faster_in_two_of_three_rounds_alone_leaves_the_default(machine):
    turns = itertools.cycle([0.7, 0.7, 1.3])
    machine.noise = lambda name, call: next(turns) if name == ("DIRECT", True) else 1.0
    result = tuned()
    assert (result.form, result.ratio) == ("GRAM", 1.0)


def test_a_wrong_candidate_is_rejected_however_fast_it_is(machine, monkeypatch):
    machine.seconds = {("DIRECT", False): 1e-4, ("GRAM", False): 5e-4}
    assert tuned().form == "DIRECT"
    right = tuning._run
    broken = []

    def wrong(x, choice, setting):
        y = right(x, choice, setting)
        if (choice.form.name, choice.batched) == ("DIRECT", False):
            broken.append(choice)
            y[-1] *= 1.001  # of the matrices that decay
        return y

    monkeypatch.setattr(tuning, "_run", wrong)
    machine.calls = []
    result = tuned((8, 24, 97))
    assert broken and ("DIRECT", False) not in machine.calls
    assert (result.form, result.batched) == ("GRAM", False)


def test_one_that_is_not_finite_is_rejected(machine, monkeypatch):
    machine.seconds = {("DIRECT", True): 1e-4}
    right = tuning._run
    spoil = {True: float("nan"), False: 1.0}
    monkeypatch.setattr(
        tuning, "_run", lambda x, one, s: right(x, one, s) * spoil[one.form.name == "DIRECT" and one.batched]
    )
    assert tuned().form == "GRAM"


def test_hopeless_candidates_are_timed_twice_and_the_others_by_turns(machine):
    machine.seconds = {("DIRECT", False): 2.5e-3, ("GRAM", False): 1.5e-3}
    tuned()
    assert machine.calls.count(("DIRECT", False)) == 2
    assert machine.calls.count(("GRAM", False)) == machine.calls.count(("GRAM", True)) - 2 == 2 + 15
    firsts = machine.calls[10::3]
    assert len(set(firsts)) == 3


def test_a_second_call_times_nothing_and_more_matrices_are_tuned_again(machine):
    first = tuned()
    machine.calls = []
    assert tuned() == tuned((1, 24, 96)) == first
    assert not machine.calls
    assert tuned((9, 24, 96)).number == 9
    assert machine.calls


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("dtype", SETTING._replace(ns_dtype=torch.bfloat16)),
        ("coefficients", SETTING._replace(coefficients=ROWS[:4])),
    ],
)
def test_choices_are_kept_by_setting(machine, key, setting):
    tuned()
    assert cached(setting) == {}
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert cached(SETTING) == {}
    finally:
        torch.set_num_threads(threads)
    assert cached(SETTING)


def test_what_goes_in_batches_is_timed_in_one_and_nothing_is_timed_in_batches_beyond_the_pool(machine):
    assert tuned((1, 24, 96)).number == 8
    assert tuned((1000, 32, 64)).number == (1 << 16) // (32 * 64)
    assert tuned((1, 256, 512)).number == 1


def test_the_budget_holds_small_shapes_come_first_and_what_is_left_keeps_the_default(machine):
    shapes = [(8, 64, 64), (8, 16, 16), (8, 32, 32)]
    machine.seconds = dict.fromkeys([("DIRECT", True), ("DIRECT", False), ("GRAM", True), ("GRAM", False)], 0.1)
    results, unreached = tuning.tune(shapes, SETTING, 10.0)
    assert machine.now <= 10.0 + 0.1
    assert [result[:3] for result in results] == [(8, 16, 16), (8, 32, 32)]
    assert unreached == {(8, 64, 64): "not reached within the budget"}
    assert (64, 64) not in cached(SETTING)


def test_what_is_known_by_fewer_matrices_stays_where_the_budget_does_not_reach_more(machine):
    first = tuned()
    machine.seconds = {("GRAM", True): 100.0}
    assert tuned((9, 24, 96)) == first
    assert cached(SETTING) == {(24, 96): first}


def test_a_machine_that_becomes_slow_ends_the_tuning_at_the_budget(machine):
    machine.noise = lambda name, call: 1.0 if call < 20 else 1000.0
    _, unreached = tuning.tune([WIDE], SETTING, 10.0)
    assert unreached == {WIDE: "not reached within the budget"}
    assert 10.0 <= machine.now <= 10.0 + 2 * 1.0


def test_a_large_shape_is_not_even_begun_where_a_small_one_tells_that_it_would_not_end(machine):
    machine.seconds = dict.fromkeys([("DIRECT", False), ("GRAM", False), ("DIRECT", True), ("GRAM", True)], 1.0)
    _, unreached = tuning.tune([(1, 2048, 2048)], SETTING, 100.0)  # of 512 s each
    assert unreached == {(1, 2048, 2048): "not reached within the budget"}
    assert machine.now <= 5


def test_an_accelerator_is_gauged_by_a_shape_that_takes_longer_than_its_launches(monkeypatch):
    """Else the time of launches, times the ratio of FLOPs, would let no large shape begin."""
    monkeypatch.setattr(tuning, "_seconds", lambda *_: 1e-3)  # what the host takes to issue them
    cuda = SETTING._replace(device=torch.device("cuda"))
    assert tuning._guessed_seconds((1, 4096, 4096), torch.empty(1 << 22), cuda) == pytest.approx(8e-3)
    assert tuning._guessed_seconds((1, 4096, 4096), torch.empty(1 << 16), SETTING) == pytest.approx(4.096)


def test_a_shape_whose_matrices_find_no_memory_says_so_and_others_are_tuned(machine, monkeypatch):
    made = tuning._random

    def random_numbers(elements, setting):
        if elements > 1 << 16:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return made(elements, setting)

    monkeypatch.setattr(tuning, "_random", random_numbers)
    results, unreached = tuning.tune([(1, 300, 300), WIDE], SETTING, 60.0)
    assert [result[:3] for result in results] == [WIDE]
    assert unreached == {(1, 300, 300): "short of memory"}


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_shape_without_memory_says_so_and_others_are_tuned(machine, monkeypatch, error):
    def run(choice, batches, setting, times):
        if batches.shape[-1] == 16:
            raise error
        return machine.run(choice, batches, setting, times)

    monkeypatch.setattr(tuning, "_seconds", run)
    results, unreached = tuning.tune([(8, 16, 16), WIDE], SETTING, 60.0)
    assert [result[:3] for result in results] == [WIDE]
    assert unreached == {(8, 16, 16): "short of memory"}


def test_real_tuning_leaves_the_users_random_numbers_alone_and_picks_a_candidate():
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)

    def states():
        return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())

    before = states()
    results, unreached = tuning.tune([(8, 16, 48), (1, 20, 9)], SETTING, 5.0)
    assert states() == before
    assert not unreached
    for result in results:
        assert result.choice in SETTING.candidates(result.rows, result.cols)
        assert result.ns > 0 and result.default_ns > 0 and result.ratio <= 1
