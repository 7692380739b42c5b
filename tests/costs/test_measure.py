"""Measuring on one rank, with a clock and batches that the test makes up; long, for they are made up here."""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dmuon._planning import costs
from dmuon._setup import agreement
from dmuon._setup.hyperparameters import Tuned
from dmuon._setup.ranks import Ranks

from dmuon import _plan

Job = costs.Job
ALONE = Ranks(((0,),), 0, "cpu", None, ((0,),))
CPU = torch.device("cpu")
UNTUNED = Tuned(torch.float32, [], {})
MUON = {
    "lr": 0.1,
    "weight_decay": 0.0,
    "momentum": 0.9,
    "nesterov": True,
    "ns_steps": 5,
    "ns_coefficients": "quintic",
    "ns_dtype": torch.float32,
    "eps": 1e-7,
    "adjust_lr_fn": None,
}
SMALL, LARGE = (1, 16, 16), (2, 64, 64)
SHAPES = {SMALL: 4, LARGE: 4}
JOBS = [Job(shape, size) for shape in SHAPES for size in (1, 2, 3, 4)]
DTYPES = dict.fromkeys(SHAPES, torch.float32)


class Machine:
    """Takes `seconds(job)` for every job, and what `hiccups[job, run]` adds; `fails[job, run]` is raised."""

    def __init__(self):
        self.now = 0.0
        self.calls = []
        self.seconds = lambda job: 1e-3 * job.size
        self.hiccups = {}
        self.fails = {}

    def run(self, job, *_):
        run = self.calls.count(job)
        self.calls.append(job)
        if (job, run) in self.fails:
            raise self.fails[job, run]
        taken = self.seconds(job) + self.hiccups.get((job, run), 0)
        self.now += taken
        return int(taken * 1e9)

    def runs(self):
        return Counter(self.calls)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    machine = Machine()
    monkeypatch.setattr(costs, "_run", machine.run)
    monkeypatch.setattr(costs, "time", SimpleNamespace(monotonic=lambda: machine.now))
    monkeypatch.setenv("DMUON_CACHE_DIR", str(tmp_path))
    return machine


def measure(jobs=JOBS, dtypes=DTYPES, known=None):
    return costs.measure(ALONE, jobs, MUON, dtypes, CPU, known or {}, UNTUNED)


def table(shapes=SHAPES):
    found = json.loads(costs.measured_costs(ALONE, shapes, MUON, DTYPES, CPU, UNTUNED).to_json())
    times = {
        ((s.get("num_matrices", 1), s["rows"], s["cols"]), b["size"]): b["ns"]
        for s in found["shapes"]
        for b in s["batches"]
    }
    return found["source"], times


def kept_file(folder):
    (file,) = (folder / "costs").iterdir()
    return file


def exactly(job, seconds):
    return pytest.approx(seconds * 1e9, abs=2)


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def test_small_batches_are_run_in_fifteen_rounds_after_one_to_warm_up(machine):
    times, scaled = measure()
    assert not scaled
    assert machine.runs() == dict.fromkeys(JOBS, 16)
    assert sorted(machine.calls[-8:]) == sorted(JOBS)  # by turns
    assert all(times[job] == exactly(job, 1e-3 * job.size) for job in JOBS)


@pytest.mark.parametrize("run", [0, 1, 2, 7])
def test_one_hiccup_skips_nothing_and_counts_for_nothing(machine, run):
    machine.hiccups = {(Job(SMALL, 1), run): 2.0}
    times, scaled = measure()
    assert not scaled
    assert machine.runs() == dict.fromkeys(JOBS, 16)
    assert times[Job(SMALL, 1)] == exactly(JOBS[0], 1e-3)


def test_a_hiccup_longer_than_the_budget_is_run_again_before_it_counts(machine):
    machine.hiccups = {(Job(SMALL, 1), 0): 60.0}
    times, scaled = measure()
    assert times[Job(SMALL, 1)] == exactly(JOBS[0], 1e-3)
    assert scaled == set(JOBS) - {Job(SMALL, 1)}


def test_a_batch_is_not_run_where_smaller_ones_of_its_shape_show_it_to_be_long(machine):
    machine.seconds = lambda job: job.size * (0.45 if job.shape == LARGE else 1e-3)
    times, scaled = measure()
    assert scaled == {Job(LARGE, size) for size in (2, 3, 4)} == set(JOBS) - set(machine.calls)
    assert all(number >= 3 for number in machine.runs().values())
    assert 5e8 < times[Job(LARGE, 2)] < times[Job(LARGE, 3)] < times[Job(LARGE, 4)] < 3e9


def test_a_long_batch_is_run_twice_and_those_of_other_shapes_as_ever(machine):
    slow, other = Job(LARGE, 4), Job((1, 80, 80), 4)
    machine.seconds = lambda job: 1.0 if job == slow else 1e-3
    jobs = [*JOBS, other]
    _, scaled = measure(jobs, {**DTYPES, other.shape: torch.float32})
    assert not scaled
    assert machine.runs() == {**dict.fromkeys(jobs, 16), slow: 2}


@pytest.mark.parametrize("number", [3, 20])
def test_the_budget_ends_any_round_and_what_it_does_not_reach_is_scaled(machine, number):
    machine.seconds = lambda job: 0.4
    jobs = [Job((1, 16, 16 + index), 1) for index in range(number)]
    times, scaled = measure(jobs, {job.shape: torch.float32 for job in jobs})
    assert 10 < machine.now <= 10 + 2 * 0.4
    assert len(scaled) == number - len(machine.runs()) == max(0, number - 13)
    assert all(10**8 < times[job] < 10**9 for job in jobs)


def test_known_times_keep_long_batches_from_being_run_at_all(machine):
    known = {Job(LARGE, size): int(size * 0.9e9) for size in (1, 2, 3)}
    times, scaled = measure([Job(LARGE, 4)], known=known)
    assert not machine.calls
    assert scaled == {Job(LARGE, 4)}
    assert list(times) == [Job(LARGE, 4)] and times[Job(LARGE, 4)] > known[Job(LARGE, 3)]


@pytest.mark.parametrize("run", [0, 1, 5])
@pytest.mark.parametrize(
    "error",
    [
        out_of_memory(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"),
        MemoryError(),
    ],
    ids=str,
)
def test_a_batch_that_lacks_memory_in_any_round_is_scaled_and_not_kept(machine, tmp_path, caplog, run, error):
    job = Job(LARGE, 4)
    machine.fails = {(job, run): error}
    source, times = table()
    assert source.endswith("1 ranks at once; 1 batch scaled by the model")
    assert 10**6 < times[job] < 10**9
    assert machine.runs()[job] == run + 1
    rows = json.loads(kept_file(tmp_path).read_text())["times"]
    assert sorted(Job((n, r, c), b) for n, r, c, b, _ in rows) == sorted(set(JOBS) - {job})
    (warning,) = [record for record in caplog.records if record.name == "dmuon"]
    assert "1 of 8 batches are scaled" in warning.getMessage()


def test_other_errors_reach_the_user(machine):
    machine.fails = {(Job(LARGE, 1), 4): RuntimeError("an illegal memory access")}
    with pytest.raises(ValueError, match=r"measuring .* failed: RuntimeError: an illegal memory access") as raised:
        measure()
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_table_without_a_measured_batch_says_that_it_is_modelled(machine, tmp_path):
    machine.fails = {(job, 0): out_of_memory() for job in JOBS}
    source, times = table()
    assert source == "model of cpu"
    assert all(times[job] == _plan.modelled_ns("cpu", job.shape, job.size) for job in JOBS)
    assert not (tmp_path / "costs").exists()


def test_what_was_scaled_is_tried_again_the_next_time(machine):
    machine.fails = {(Job(LARGE, 4), 0): out_of_memory()}
    table()
    machine.calls, machine.fails = [], {}
    source, _ = table()
    assert set(machine.calls) == {Job(LARGE, 4)}
    assert source.endswith("at once")
    machine.calls = []
    assert table()[0] == source
    assert not machine.calls


def test_the_bar_counts_seconds_up_to_the_budget(machine, monkeypatch):
    counted = []

    class Bar:
        def __init__(self, total, **_):
            self.n, self.total = 0.0, total

        def __enter__(self):
            return self

        def __exit__(self, *_):
            counted.append((self.n, self.total))

        def update(self, by):
            self.n += by

    monkeypatch.setattr(costs, "tqdm", Bar)
    measure()
    assert counted == [(pytest.approx(machine.now), 10.0)]
    machine.seconds = lambda job: 0.4
    measure()
    assert counted[1] == (10.0, 10.0)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_stays_out_of_logs(machine, monkeypatch, terminal):
    bars = []

    class Bar(costs.tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            bars.append(bool(self.disable))

    monkeypatch.setattr(costs, "tqdm", Bar)
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    measure()
    assert bars == [not terminal]


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept | {"times": [[*row[:-1], float("inf")] for row in kept["times"]]},
        lambda kept: kept | {"times": [[*row[:-1], 2**60 + 1] for row in kept["times"]]},
        lambda kept: kept | {"times": [[*row[:-1], -5] for row in kept["times"]]},
        lambda kept: kept | {"times": [[*row[:-1], 1.5] for row in kept["times"]]},
        lambda kept: kept | {"times": [[*row[:-1], True] for row in kept["times"]]},
        lambda kept: kept | {"times": [[*row[:-1], str(row[-1])] for row in kept["times"]]},
        lambda kept: kept | {"times": [row[:-1] for row in kept["times"]]},
        lambda kept: kept | {"times": 3},
        lambda kept: [kept],
        lambda kept: "[" * 100_000,
        lambda kept: b"\xff\xfe",
    ],
)
def test_what_is_damaged_is_measured_again(machine, tmp_path, damage):
    _, before = table()
    file = kept_file(tmp_path)
    damaged = damage(json.loads(file.read_text()))
    if isinstance(damaged, bytes):
        file.write_bytes(damaged)
    else:
        file.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
    machine.calls = []
    _, after = table()
    assert set(machine.calls) == set(JOBS)
    assert after == before
    machine.calls = []
    table()
    assert not machine.calls


@pytest.mark.parametrize("damage", [lambda row: row[:-1], lambda row: [*row, 1], lambda row: 3, lambda row: None])
def test_one_damaged_row_is_measured_again_alone(machine, tmp_path, damage):
    _, before = table()
    file = kept_file(tmp_path)
    kept = json.loads(file.read_text())
    n, rows, cols, size, _ = lost = kept["times"].pop()
    file.write_text(json.dumps(kept | {"times": [damage(lost), *kept["times"]]}))
    machine.calls = []
    _, after = table()
    assert set(machine.calls) == {((n, rows, cols), size)}
    assert after == before


def test_the_home_is_not_looked_for_where_nothing_is_kept(machine, monkeypatch):
    def refused(*_):
        raise AssertionError("expanduser was called")

    monkeypatch.setattr(os.path, "expanduser", refused)
    monkeypatch.setattr(Path, "expanduser", refused)
    monkeypatch.setenv("DMUON_CACHE_DIR", "")
    table()
    table()
    assert machine.runs() == dict.fromkeys(JOBS, 32)


def test_without_a_home_nothing_is_kept(machine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("DMUON_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    table()
    assert not list(tmp_path.iterdir())


def test_one_row_of_coefficients_is_kept_as_its_name_is(machine):
    row = (3.4445, -4.7750, 2.0315)
    keys = [
        costs._key(ALONE, {**MUON, "ns_coefficients": given}, DTYPES, CPU, UNTUNED) for given in ("quintic", row, [row])
    ]
    assert keys[0] == keys[1] == keys[2]


def test_only_slot_0_looks_at_what_is_kept(machine, monkeypatch):
    def refused(*_):
        raise AssertionError("the file was read")

    second = Ranks(((0, 1),), 1, "cpu", None, ((0, 1),))
    expected = {job: 7 for job in JOBS}
    monkeypatch.setattr(costs, "CacheFile", refused)
    monkeypatch.setattr(agreement, "from_owner", lambda ranks, slot, value: (expected, None))
    found = costs.measured_costs(second, SHAPES, MUON, DTYPES, CPU, UNTUNED)
    assert '"ns":7' in found.to_json().replace(" ", "")


def test_a_write_that_fails_leaves_nothing_behind(machine, monkeypatch, tmp_path, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(Path, "replace", full)
    _, times = table()
    assert len(times) == len(JOBS)
    assert not list((tmp_path / "costs").iterdir())
    assert "No space left" in caplog.text
