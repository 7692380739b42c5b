"""Choices of the tuner are cached by setting, in a file that is whole at any moment, and Muon reads them."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest
import torch
from dmuon._planning import choices
from dmuon._planning.choices import cached, store
from tuning_machine import SETTING, WIDE, result_of, tuned

pytestmark = pytest.mark.usefixtures("own_cache")


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
    "other version": lambda text, kept: json.dumps({**kept, "key": {**kept["key"], "version": 99}}),
    "no such form": lambda text, kept: json.dumps(changed(kept, form="FAST")),
    "no candidate": lambda text, kept: json.dumps(changed(kept, form="SEGMENTED")),
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


def test_of_a_file_with_a_damaged_row_the_others_count_and_stay(tmp_path, caplog):
    for cols in (5, 6, 7):
        store(result_of(24, cols), SETTING)
    file = kept_file(tmp_path)
    content = json.loads(file.read_text())
    content["choices"][1]["form"] = "FAST"
    file.write_text(json.dumps(content))
    assert cached(SETTING).keys() == {(24, 5), (24, 7)}
    (warning,) = [record for record in caplog.records if record.name == "dmuon"]
    assert "1 tuned choices are not read from" in warning.getMessage()
    store(result_of(24, 8), SETTING)
    assert cached(SETTING).keys() == {(24, 5), (24, 7), (24, 8)}
    assert len(caplog.records) == 1


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
        store(result_of(7, cols), SETTING)
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
        found = cached(SETTING)
        assert {(7, cols) for cols in range(1, first + told)} <= found.keys()
        assert all(one == result_of(*one[1:3]) for one in found.values())
        first = max(cols for _, cols in found) + 1
    store(result_of(7, first), SETTING)
    assert len(list((tmp_path / "tuned").iterdir())) == 1
    assert not [record for record in caplog.records if record.name == "dmuon"]


def test_two_processes_at_once_lose_nothing():
    children = [forked(lambda writes, first=first: keep_many(first, 30, writes)) for first in (1, 101, 201)]
    for child, reads in children:
        os.waitpid(child, 0)
        os.close(reads)
    assert cached(SETTING).keys() == {(7, first + at) for first in (1, 101, 201) for at in range(30)}


def test_muon_takes_what_is_kept_of_its_shapes_alone_and_says_so(caplog):
    from dmuon._setup.ranks import Ranks

    alone = Ranks(((0,),), 0, "cpu", None, ((0,),))
    muon = {"ns_coefficients": "polar_express", "ns_steps": 5, "ns_dtype": torch.float32}
    store(result_of(24, 96), SETTING)
    store(result_of(30, 30), SETTING)
    with caplog.at_level("INFO", "dmuon"):
        found = choices.cached_choices(alone, {WIDE, (1, 5, 5)}, muon, SETTING.device)
    assert found.rows() == [(24, 96, "cpu", "DIRECT", False, 0, "")]
    assert "1 of 2 shapes are orthogonalised as `dmuon tune` has chosen" in caplog.text
    assert choices.cached_choices(alone, {WIDE}, {**muon, "ns_steps": 4}, SETTING.device).choices == {}
