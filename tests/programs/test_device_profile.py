"""A profile on the asynchronous device: when operations ran there, not when the host issued them."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.nn as nn
from test_device_step import start

import dmuon

pytestmark = pytest.mark.xdist_group("async_device")


def profiled(mesh: Any) -> tuple[dmuon.Profile, float]:
    """Of one step, and when the host had issued all of it: before anything of it ran."""
    import async_device

    device = torch.device("emulated", torch.emulated.current_device())
    async_device.configure(order="compute_first", idle_ms=60_000)
    try:
        model, opt = start(mesh, device)
        tokens = torch.arange(6).to(device)

        def step() -> None:
            nn.functional.cross_entropy(model(tokens), tokens).backward()
            opt.step()
            opt.zero_grad()

        step()
        step()
        with dmuon.profile(model) as profile:
            with async_device.no_host_sync():
                step()
            issued = time.time()
        return profile, issued
    finally:
        async_device.configure(order="random", idle_ms=2)


def test_spans_are_when_the_device_worked(device_ranks):
    profile, issued = device_ranks.run(profiled, (2, 2))[0]
    of_rank = [span for span in profile.spans if span.rank == 0]
    assert {span.lane for span in of_rank} == {"compute", "update", "intra", "inter"}
    for span in of_rank:
        assert span.started <= span.done
        assert span.done > issued  # begun by the profile's end, when the device was first waited for
    for lane in ("update", "intra", "inter"):
        spans = [span for span in of_rank if span.lane == lane]
        assert all(one.done <= other.started + 1e-4 for one, other in itertools.pairwise(spans))
    arrivals = {span.unit: span.done for span in of_rank if span.kind == "publish intra"}
    awaited = [span for span in of_rank if span.kind == "await weights" and span.unit in arrivals]
    assert awaited and 0 <= profile.hidden() <= 1
    assert "%" in profile.summary()
