"""The factor of clipping waits for the step, whose bits are those of gradients that were multiplied at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dmuon._running.runtime import runtime_of
from dmuon._setup.placeholder import OwnedTensor
from models import batch, loss_of, make_gpt, part
from tp_models import OnRanks
from training import AHEAD, KEPT_NO_COPY, LR, dedicate, place_of, shard, weights_of

import dmuon


def settle(model: Any) -> None:
    """Who reads an owned gradient finds it multiplied."""
    runtime = runtime_of(model, "settle")
    for leaf in range(len(runtime.leaves)):
        runtime.transfers.owned_parts(leaf, "gradient")


class Program:
    """Three steps; `how` says what happens in the second, between its backward and its end."""

    def __init__(self, mesh: Any, schedule: dict[str, Any], at_once: bool) -> None:
        """`at_once`: gradients are multiplied after each clipping."""
        self.mesh, self.at_once = mesh, at_once
        self.model = make_gpt(depth=2)
        dedicate(self.model, mesh, schedule)
        shard(self.model, mesh)
        self.opt = dmuon.Muon(self.model, lr=LR, ns_dtype=torch.float32)

    def run(self, how: str) -> None:
        for step in range(3):
            self.backward(step)
            self.clip(0.3)
            if step == 1:
                getattr(self, how)()
            self.opt.step()
            self.opt.zero_grad(set_to_none=how != "zeros_them")

    def backward(self, step: int) -> None:
        loss_of(self.model, part(batch(step), *place_of(self.mesh))).backward()

    def clip(self, max_norm: float) -> None:
        dmuon.clip_grad_norm_(self.model, max_norm)
        self.settle_at_once()

    def settle_at_once(self) -> None:
        if self.at_once:
            settle(self.model)

    def once(self) -> None: ...

    def twice(self) -> None:
        self.clip(0.07)

    def adds_to_them(self) -> None:
        self.backward(7)

    def clears_them(self) -> None:
        self.opt.zero_grad()
        self.backward(7)

    def zeros_them(self) -> None:
        self.opt.zero_grad(set_to_none=False)
        self.backward(7)

    def clears_one(self) -> None:
        self.matrix.grad = None

    def zeros_one(self) -> None:
        self.matrix.grad.zero_()

    def scales_one(self) -> None:
        self.matrix.grad.mul_(3.0)

    def steps_twice(self) -> None:
        self.opt.step()

    def unscales(self) -> None:
        self.opt.grad_scale = torch.tensor(3.0)
        self.opt.step()
        del self.opt.grad_scale

    def skips(self) -> None:
        """A factor that is no number spoils gradients, but not the zeros that come after it."""
        before = weights_of(self.model)
        self.opt.grad_scale = torch.tensor(math.nan)
        self.opt.step()
        del self.opt.grad_scale
        assert all(torch.equal(weight, before[name]) for name, weight in weights_of(self.model).items())
        assert self.opt.skipped_steps == 1
        self.opt.zero_grad(set_to_none=False)
        self.backward(7)

    def adds_under_no_sync(self) -> None:
        with dmuon.no_sync(self.model):
            self.backward(7)
        self.backward(8)

    def clips_by_torch(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.settle_at_once()

    def verifies(self) -> None:
        self.opt.step()
        self.opt.zero_grad()
        dmuon.verify(self.model, self.opt)
        self.backward(7)
        self.clip(0.2)

    def moves_and_averages(self) -> None:
        """What comes between clipping and a step finds a factor that waits, and leaves it."""
        dmuon.offload(self.model)
        dmuon.load(self.model)
        self.clip(0.2)
        average = dmuon.Ema(self.model, 0.9)
        average.update()
        with average.applied():
            pass
        self.clip(0.15)
        self.opt.load_state_dict(self.opt.state_dict())
        self.clip(0.1)
        with dmuon.full_params(self.model):
            pass

    @property
    def matrix(self) -> Any:
        return self.model.blocks[0].up.weight

    def bits(self) -> dict[str, torch.Tensor]:
        momenta = {
            f"momentum of {name}": self.opt.state[parameter]["momentum_buffer"].clone()
            for name, parameter in self.model.named_parameters()
            if isinstance(parameter, OwnedTensor)
            and not isinstance(self.opt.state[parameter]["momentum_buffer"], OwnedTensor)
        }
        return {**weights_of(self.model), **momenta}


def ran(mesh: Any, how: str, schedule: dict[str, Any], at_once: bool) -> dict[str, torch.Tensor]:
    program = Program(mesh, schedule, at_once)
    program.run(how)
    return program.bits()


HOW = (
    *("once", "twice", "adds_to_them", "clears_them", "zeros_them", "clears_one", "zeros_one", "scales_one"),
    *("steps_twice", "unscales", "skips", "adds_under_no_sync", "clips_by_torch", "verifies", "moves_and_averages"),
)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("mesh", "schedule"), [((2, 2), AHEAD), ((3,), KEPT_NO_COPY)])
def test_a_factor_that_waits_changes_no_bit(ranks, mesh, schedule, how):
    waited, at_once = (ranks.run(ran, mesh, how=how, schedule=schedule, at_once=at_once) for at_once in (False, True))
    owned = set()
    for one, other in zip(waited, at_once, strict=True):
        assert one.keys() == other.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
        assert all(value.isfinite().all() for value in one.values())
        owned |= {name for name in one if name.startswith("momentum of ")}
    assert len(owned) == 2 * 4


def sliced(mesh: Any, at_once: bool) -> dict[str, torch.Tensor]:
    ranks = OnRanks(mesh.device_type, (2, 2))

    def clip(model: Any) -> None:
        for most in (0.3, 0.1):
            dmuon.clip_grad_norm_(model, most)
            if at_once:
                settle(model)

    ranks.run(3, 2, clip)
    saved: dict[str, torch.Tensor] = ranks.saved()
    return saved


def test_a_factor_that_waits_changes_no_bit_of_slices(ranks):
    waited, at_once = (ranks.run(sliced, (4,), at_once=at_once) for at_once in (False, True))
    for one, other in zip(waited, at_once, strict=True):
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
