"""Messages of set-up say that a peer was lost."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from dmuon._setup import agreement


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("all_reduce", lambda ranks: agreement.largest(ranks, [1.0])),
        ("broadcast_object_list", lambda ranks: agreement.from_owner(ranks, 0, "a plan")),
        ("all_gather_object", lambda ranks: agreement.all_gather(ranks, "a name")),
    ],
)
def test_a_failure_says_that_a_rank_was_lost(monkeypatch, message, call):
    def fail(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError("Connection closed by peer")

    monkeypatch.setattr(agreement, "everyone_group", lambda ranks: object())
    monkeypatch.setattr(dist, message, fail)
    with pytest.raises(RuntimeError, match=r"dmuon: .* failed: a rank died, or did not come\. Reported: Connection"):
        call(SimpleNamespace(owner=0, everyone=(0, 1), size=2))
