"""The groups in which a host may wait outside of the engine."""

from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

from dmuon._setup import groups


def test_each_mesh_over_the_same_ranks_adds_its_groups_once(monkeypatch):
    monkeypatch.setattr(groups, "_other_groups", lambda ranks: ranks.others)
    monkeypatch.setattr(groups._C, "Group", lambda group, name, *_: (group.label, name))
    added: list[Any] = []
    shared = groups._Shared(SimpleNamespace(add_other=added.append), groups=(), ranks=None, others=[], users=WeakSet())  # type: ignore[arg-type]
    a, b, slots = (SimpleNamespace(label=label, rank=lambda: 0, size=lambda: 2) for label in ("a", "b", "slots"))
    for others in ([a], [b], [a, slots], [b, slots]):
        shared.add_others(SimpleNamespace(others=others, device_type="cpu"))  # type: ignore[arg-type]
    assert added == [("a", "other 0"), ("b", "other 1"), ("slots", "other 2")]
