"""Messages of large gradients that no fully_shard manages have one place between operations on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from dmuon._running.runtime import runtime_of
from models import batch, loss_of, make_gpt, part
from scenario import Session, check
from training import AHEAD, REPLICATED, dedicate

import dmuon

MESHES = [((2, 2), REPLICATED), ((1, 4), AHEAD), ((3,), REPLICATED)]


class Table(nn.Module):
    """The last use of `table` in a forward, whose gradient comes first, may be its only one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(600))
        self.blocks = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, again: bool) -> torch.Tensor:
        if again:
            x = x * self.table[:12]
        for block in self.blocks:
            x = x + block(x)
        return x * self.table[12:24]


def late(s: Session, who: str, micro_steps: int) -> None:
    """From the second step on gradients of some ranks come later than in the backward that has found the place."""
    torch.manual_seed(0)
    s.start(Table(), units=None)
    for step in range(4):
        for micro_step in range(micro_steps):
            seed = 100 * step + 10 * micro_step

            def loss(model: nn.Module, rank: int, step: int = step, seed: int = seed) -> torch.Tensor:
                x = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed + rank))
                return model(x, again=step > 0 and (who == "all" or rank == 1)).square().mean()

            s.backward(loss)
        s.clip(0.5)
        s.step()


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.parametrize(("mesh", "schedule"), MESHES)
def test_a_gradient_that_comes_after_its_message_counts_in_the_mean(ranks, mesh, schedule, who, micro_steps):
    *notes, expected = check(ranks, late, mesh, schedule=schedule, who=who, micro_steps=micro_steps)
    for norms in notes:
        assert norms == pytest.approx(expected, rel=1e-4)


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

    def note_and_send(backward: Any) -> None:
        sent.append((names[backward.large[-1]], runtime.engine.num_crossed()))
        send_large(backward)

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
