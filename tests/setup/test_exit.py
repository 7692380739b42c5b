"""At exit all failed meshes have one grace together."""

import time

from dmuon._setup import groups


class Stuck:
    """A mesh whose lanes never finish."""

    def leave(self, grace_ms: int) -> None:
        time.sleep(grace_ms / 1000)


def test_several_failed_meshes_have_no_more_time_than_one(monkeypatch):
    monkeypatch.setattr(groups, "_engine_groups", {(0,): (Stuck(), (), None)})
    monkeypatch.setattr(groups, "_over", [(Stuck(), (), None) for _ in range(20)])
    monkeypatch.setattr(groups, "_GRACE_S", 0.2)
    begun = time.monotonic()
    groups._leave()
    assert 0.2 <= time.monotonic() - begun < 2
    assert not groups._engine_groups and not groups._over
