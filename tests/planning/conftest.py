"""What tests of the tuner start with: a cache of their own, and a machine whose times they choose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from dmuon._planning import tuning
from dmuon._planning.choices import Setting
from tuning_machine import Machine


@pytest.fixture
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
    # The backend of any machine.
    all_of = Setting.candidates
    monkeypatch.setattr(Setting, "candidates", lambda *to: [one for one in all_of(*to) if one.backend == "cpu"])
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: machine.now))
    return machine
