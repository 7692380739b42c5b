"""The tuner on a clock that the test makes up; what it keeps, also where processes die or write at once."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
from dmuon._planning import choices, tuning
from dmuon._planning.choices import Result, Setting, keep, kept

from dmuon import _C

ROWS = _C.resolve_coefficients("polar_express", 5)
SETTING = Setting(torch.device("cpu"), torch.float32, ROWS)
WIDE = (8, 24, 96)  # Gram by default, in batches


class Machine:
    """Takes `seconds[form name, batched]` a call, or 1 ms; `noise` multiplies them."""

    def __init__(self):
        self.now, self.calls, self.seconds = 0.0, [], {}
        self.noise = lambda name, call: 1.0

    def run(self, choice, batches, setting, times):
        name = choice.form.name, choice.batched
        self.calls.append(name)
        taken = times * self.seconds.get(name, 1e-3) * self.noise(name, len(self.calls))
        self.now += taken
        return taken


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_POOL_ELEMENTS", 1 << 16)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(tuning, "_seconds", machine.run)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: machine.now))
    return machine


def tuned(shape=WIDE, budget_s=60.0):
    (result,), unreached = tuning.tune([shape], SETTING, budget_s)
    assert not unreached
    return result


def result_of(rows, cols, form="DIRECT", batched=False, number=8):
    return Result(number, rows, cols, form, batched, 10, 1e-6, "GRAM", True, 20, 1e-6, 0.5)


def test_the_fastest_choice_is_taken_and_kept(machine):
    machine.seconds = {("DIRECT", True): 0.9e-3, ("DIRECT", False): 0.5e-3, ("GRAM", False): 0.7e-3}
    result = tuned()
    assert (result.form, result.batched, result.default_form, result.default_batched) == ("DIRECT", False, "GRAM", True)
    assert (result.ns, result.default_ns, result.ratio) == (500_000, 1_000_000, pytest.approx(0.5))
    assert 0 < result.error < 1e-4 and 0 < result.default_error < 1e-4
    assert kept(SETTING) == {(24, 96): result}


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
    assert machine.calls.count(("GRAM", False)) == machine.calls.count(("GRAM", True)) - 1 == 2 + 15
    firsts = machine.calls[9::3]
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
    assert kept(setting) == {}
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert kept(SETTING) == {}
    finally:
        torch.set_num_threads(threads)
    assert kept(SETTING)


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
    assert (64, 64) not in kept(SETTING)


def test_what_is_known_by_fewer_matrices_stays_where_the_budget_does_not_reach_more(machine):
    first = tuned()
    machine.seconds = {("GRAM", True): 100.0}
    assert tuned((9, 24, 96)) == first
    assert kept(SETTING) == {(24, 96): first}


def test_a_machine_that_becomes_slow_ends_the_tuning_at_the_budget(machine):
    machine.noise = lambda name, call: 1.0 if call < 20 else 1000.0
    _, unreached = tuning.tune([WIDE], SETTING, 10.0)
    assert unreached == {WIDE: "not reached within the budget"}
    assert 10.0 <= machine.now <= 10.0 + 2 * 1.0


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


# ---- what is kept ----


def kept_file(folder):
    (file,) = (folder / "tuned").glob("*.json")
    return file


def changed(kept, **values):
    return {**kept, "choices": [{**row, **values} for row in kept["choices"]]}


DAMAGE = {
    "cut": lambda text, kept: text[:-20],
    "empty": lambda text, kept: "",
    "binary": lambda text, kept: "\udcff",
    "deep": lambda text, kept: "[" * 100_000,
    "other key": lambda text, kept: json.dumps({**kept, "key": {**kept["key"], "threads": 99}}),
    "other version": lambda text, kept: json.dumps({**kept, "key": {**kept["key"], "version": 2}}),
    "no such form": lambda text, kept: json.dumps(changed(kept, form="FAST")),
    "no candidate": lambda text, kept: json.dumps(changed(kept, form="PAIRS")),
    "text": lambda text, kept: json.dumps(changed(kept, rows="24")),
    "no rows": lambda text, kept: json.dumps(changed(kept, rows=0)),
    "more": lambda text, kept: json.dumps(changed(kept, more=1)),
    "costs": lambda text, kept: json.dumps({"key": kept["key"], "times": [[1, 2, 3, 4, 5]]}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_file_is_told_once_and_tuned_again(machine, tmp_path, caplog, damage):
    before = tuned()
    file = kept_file(tmp_path)
    text = file.read_text()
    file.write_text(DAMAGE[damage](text, json.loads(text)), errors="surrogateescape")
    machine.calls = []
    assert tuned() == before
    assert machine.calls
    (warning,) = [record for record in caplog.records if record.name == "dmuon"]
    assert "tuned choices are not read from" in warning.getMessage() and str(file) in warning.getMessage()
    machine.calls = []
    tuned()
    assert not machine.calls


def test_without_a_folder_nothing_is_kept_and_nothing_read(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("DMUON_CACHE_DIR", "")
    tuned()
    calls = len(machine.calls)
    tuned()
    assert len(machine.calls) == 2 * calls
    assert not list(tmp_path.iterdir())


def forked(work):
    """Runs it in a child process; what it writes to the pipe can be read here."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reads)
            work(writes)
        finally:
            os._exit(0)
    os.close(writes)
    return child, reads


def keep_many(first, count, writes):
    for cols in range(first, first + count):
        keep(result_of(7, cols), SETTING)
        os.write(writes, b"x")


def test_a_process_killed_at_any_moment_leaves_all_that_it_had_kept(tmp_path, caplog):
    numbers, first = random.Random(0), 1
    for _ in range(12):
        child, reads = forked(lambda writes, first=first: keep_many(first, 10_000, writes))
        os.read(reads, 1)
        time.sleep(numbers.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = 1 + len(os.read(reads, 1 << 16))
        os.close(reads)
        found = kept(SETTING)
        assert {(7, cols) for cols in range(1, first + told)} <= found.keys()
        assert all(one == result_of(*one[1:3]) for one in found.values())
        first = max(cols for _, cols in found) + 1
    assert not [record for record in caplog.records if record.name == "dmuon"]


def test_two_processes_at_once_lose_nothing():
    children = [forked(lambda writes, first=first: keep_many(first, 30, writes)) for first in (1, 101, 201)]
    for child, reads in children:
        os.waitpid(child, 0)
        os.close(reads)
    assert kept(SETTING).keys() == {(7, first + at) for first in (1, 101, 201) for at in range(30)}


def test_muon_takes_what_is_kept_of_its_shapes_alone_and_says_so(caplog):
    from dmuon._setup.ranks import Ranks

    alone = Ranks(((0,),), 0, 0, "cpu", None, ((0,),))
    muon = {"ns_coefficients": "polar_express", "ns_steps": 5, "ns_dtype": torch.float32}
    keep(result_of(24, 96), SETTING)
    keep(result_of(30, 30), SETTING)
    with caplog.at_level("INFO", "dmuon"):
        found = choices.kept_choices(alone, {WIDE, (1, 5, 5)}, muon, SETTING.device)
    assert found.rows() == [(24, 96, "DIRECT", False)]
    assert "1 of 2 shapes are orthogonalised as `dmuon tune` has chosen" in caplog.text
    assert choices.kept_choices(alone, {WIDE}, {**muon, "ns_steps": 4}, SETTING.device).choices == {}
