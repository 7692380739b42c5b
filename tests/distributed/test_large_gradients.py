"""Where messages of large gradients that no fully_shard manages have their place between the engine's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dmuon._running.runtime import runtime_of
from models import batch, loss_of, make_gpt, part
from training import REPLICATED, dedicate

import dmuon


def sent_at(mesh: Any, num_models: int, averages: bool) -> list[list[tuple[str, int]]]:
    """Returns for three backwards the large gradients as their messages left, with the triggers crossed until then.

    Rank 1 computes the third loss and drops it.
    """
    models = [make_gpt(depth=2) for _ in range(num_models)]
    for model in models:
        dedicate(model, mesh, REPLICATED)
    optimizers = [dmuon.Muon(model, lr=1e-2) for model in models]
    runtime = runtime_of(models[0], "test")
    names = {parameter: name.removesuffix(".weight") for name, parameter in models[0].named_parameters()}
    sent: list[tuple[str, int]] = []
    send_large = runtime.plain._send_large

    def note_and_send(backward: Any, parameter: torch.Tensor) -> None:
        sent.append((names[parameter], runtime.engine.num_crossed()))
        send_large(backward, parameter)

    runtime.plain._send_large = note_and_send
    notes = []
    for step in range(3):
        loss = loss_of(models[0], part(batch(step), mesh.get_rank(), mesh.size()))
        if step < 2 or mesh.get_rank() != 1:
            loss.backward()
        if averages and step == 1:
            models[0].head.weight.grad = torch.ones_like(models[0].head.weight)
        notes.append(sent[:])
        sent.clear()
        optimizers[0].step()
        notes[-1] += sent if step == 2 else []
        sent.clear()
    return notes


@pytest.mark.parametrize(("num_models", "averages"), [(1, False), (1, True), (2, False)])
def test_large_gradients_leave_at_one_place_between_operations_of_all_ranks(ranks, num_models, averages):
    notes = ranks.run(sent_at, (4,), num_models=num_models, averages=averages)
    first, second, third = notes[0]
    assert all(of_rank == notes[0] for of_rank in notes)
    end = first[0][1]
    at_the_end, early = [("head", end), ("embedding", end)], [("head", 0), ("embedding", end)]
    assert end == 4 and first == at_the_end
    if num_models == 2:  # one backward might go through both
        assert second == third == at_the_end
    else:
        assert second == early
        assert third == (at_the_end if averages else early)  # places are found anew
