"""A program that ends: it waits for late updates for a while, and for a user's function until that returns."""

import subprocess
import sys
import time
from weakref import WeakSet

import pytest
from dmuon._setup import groups


class Stuck:
    """A mesh whose lanes never finish."""

    def failure(self) -> str:
        return "its update has failed"

    def leave(self, grace_ms: int) -> str:
        time.sleep(grace_ms / 1000)
        return self.failure()


class Healthy(Stuck):
    grace_ms = 0

    def failure(self) -> str:
        return ""

    def leave(self, grace_ms: int) -> str:
        self.grace_ms = grace_ms
        return self.failure()


def shared_by(mesh):
    return groups._Shared(mesh, groups=(), ranks=None, others=[], users=WeakSet())


def test_several_failed_meshes_have_no_more_time_than_one(monkeypatch, caplog):
    healthy = Healthy()
    monkeypatch.setattr(groups, "_engine_groups", {(0,): shared_by(Stuck()), (1,): shared_by(healthy)})
    monkeypatch.setattr(groups, "_over", [shared_by(Stuck()) for _ in range(20)])
    monkeypatch.setattr(groups, "_GRACE_S", 0.2)
    asked: list[int] = []  # and nothing is ended: this process goes on
    monkeypatch.setattr(groups._C, "end_user_functions", lambda most_ms: asked.append(most_ms) or len(asked) == 2)
    begun = time.monotonic()
    groups._leave()
    assert time.monotonic() - begun < 2
    assert healthy.grace_ms > 100, "those that have failed do not take its time"
    assert not groups._engine_groups and not groups._over
    assert len(asked) == 2, "until none runs"
    assert caplog.text.count("its update has failed") == 21, "once for each that has failed"


PROGRAM = """
import os, time, torch, dmuon
from dmuon._setup import groups

groups._GRACE_S = {grace_s}

def after(update, weights, state, options):
    time.sleep({sleeps_s})
    os.write(2, b"[back] ")
    if {fails}:
        raise ValueError("no such thing")
    return update

dmuon.rules.register("slow", after=after)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
dmuon.dedicate_params(model, late_updates=True, costs="modelled")
opt = dmuon.Muon(model, rule="slow")
model(torch.ones(2, 8)).sum().backward()
opt.step()
"""


AND_CATCHES = """
try:
    model(torch.ones(2, 8))
except RuntimeError as error:
    os.write(2, b"[caught] " if "no such thing" in str(error) else b"[another]")
"""


def ended(grace_s: float, sleeps_s: float, fails: bool, then: str = "") -> str:
    """Runs a program that ends while a user's function sleeps. Returns what it has written."""
    program = PROGRAM.format(grace_s=grace_s, sleeps_s=sleeps_s, fails=fails) + then
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stderr


def test_an_error_that_no_call_raises_is_a_warning():
    assert "rule 'slow': ValueError: no such thing" in ended(grace_s=30, sleeps_s=0.1, fails=True)


def test_an_error_that_a_call_has_raised_is_none():
    written = ended(grace_s=30, sleeps_s=0.1, fails=True, then=AND_CATCHES)
    assert "[caught]" in written and "the program has ended before" not in written


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_does_not_come_back_to_an_interpreter_that_has_ended(fails):
    written = ended(grace_s=0.1, sleeps_s=2, fails=fails)
    assert written.count("[back]") == 1, "no other function begins"
    assert "Fatal" not in written
    assert "[back]" in written[written.index("the program ends when a function") :]
