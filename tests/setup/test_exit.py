"""At exit all failed meshes have one grace together."""

import time

from dmuon._setup import groups


class Stuck:
    """A mesh whose lanes never finish."""

    def failure(self) -> str:
        return "its update has failed"

    def leave(self, grace_ms: int) -> None:
        time.sleep(grace_ms / 1000)


class Healthy(Stuck):
    grace_ms = 0

    def failure(self) -> str:
        return ""

    def leave(self, grace_ms: int) -> None:
        self.grace_ms = grace_ms


def shared_by(mesh):
    return groups._Shared(mesh, groups=(), ranks=None, others=[])


def test_several_failed_meshes_have_no_more_time_than_one(monkeypatch):
    healthy = Healthy()
    monkeypatch.setattr(groups, "_engine_groups", {(0,): shared_by(Stuck()), (1,): shared_by(healthy)})
    monkeypatch.setattr(groups, "_over", [shared_by(Stuck()) for _ in range(20)])
    monkeypatch.setattr(groups, "_GRACE_S", 0.2)
    begun = time.monotonic()
    groups._leave()
    assert time.monotonic() - begun < 2
    assert healthy.grace_ms > 100, "those that have failed do not take its time"
    assert not groups._engine_groups and not groups._over
