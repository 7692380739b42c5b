"""In the model's forward matrices have the compute dtype. Outside of it they are the parameters of the groups."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import Gpt, batch, make_gpt
from scenario import Session, check
from torch.distributed.fsdp import MixedPrecisionPolicy
from training import AHEAD, KEPT

import dmuon

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def started(mesh: Any, model: nn.Module | None = None) -> Session:
    s = Session(mesh, KEPT)
    s.start(model or make_gpt(depth=2), mp_policy=BF16)
    return s


def strangers(s: Session) -> list[str]:
    """Matrices that are not the parameters of the groups."""
    known = {id(p) for group in s.opt.param_groups for p in group["params"]}
    names = [row.name for row in dmuon.routing_table(s.model) if row.algorithm == "muon"]
    return [name for name in names if id(s.model.get_parameter(name)) not in known]


def interrupted(s: Session, what_then: str, alone: bool) -> None:
    """`alone`: the first rank is, and the others end their forward, of plain replicas."""
    how: dict[str, Any] = {"units": None} if alone else {"mp_policy": BF16}
    model = s.start(make_gpt(depth=2), **how)
    s.train(0)
    if not s.reference:
        hits = s.rank == 0 or not alone
        handle = model.blocks[1].up.register_forward_pre_hook(interrupt if hits else lambda *_: None)
        with pytest.raises(KeyboardInterrupt) if hits else nullcontext():
            model(batch(1))
        handle.remove()
        if what_then == "step":
            s.opt.step()
        elif what_then == "zero_grad":
            s.opt.zero_grad()
        elif what_then == "state_dict":
            model.state_dict()
        else:
            with torch.no_grad():
                model(batch(1))
        s.notes += strangers(s)
    s.train(1, 2)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what_then", ["a forward", "step", "zero_grad", "state_dict"])
@pytest.mark.parametrize(("mesh", "schedule"), [((2,), AHEAD), ((1,), KEPT)])
def test_training_goes_on_after_a_keyboard_interrupt_in_a_forward(ranks, mesh, schedule, what_then):
    how = {"what_then": what_then, "alone": False}
    assert not any(check(ranks, interrupted, mesh, schedule=schedule, bound=0.1, among="up", **how))


def test_training_goes_on_after_a_keyboard_interrupt_of_one_rank(ranks):
    check(ranks, interrupted, (2,), schedule=AHEAD, what_then="a forward", alone=True)


class Twice(Gpt):
    """Calls itself in its forward, which goes on afterwards."""

    is_outer = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.is_outer:
            self.is_outer = False
            with torch.no_grad():
                self(tokens)
            self.is_outer = True
        self.dtypes.append(self.blocks[0].up.weight.dtype)
        return super().forward(tokens)


def inside_itself(mesh: Any) -> tuple[list[torch.dtype], list[str]]:
    s = started(mesh, Twice(depth=2))
    s.model.dtypes = []
    s.train(0)
    return s.model.dtypes, strangers(s)


def test_a_forward_inside_of_another_leaves_the_compute_dtype(ranks):
    assert ranks.run(inside_itself, (2,)) == [([torch.bfloat16] * 2, [])] * 2


def frozen_inside(mesh: Any, by: str) -> list[bool]:
    """For each change of a flag in a forward: the flag in the next forward, and after it."""
    s = started(mesh)
    block = s.model.blocks[0]
    of_group, found = block.up.weight, []
    for is_trainable in (False, True):

        def change(*_: Any, is_trainable: bool = is_trainable) -> None:
            (of_group if by == "the group's" else block.up.weight).requires_grad_(is_trainable)

        # Changes the placeholder after the block's call, and reads the weight inside of it.
        for layer, hook in (
            (s.model.norm, change),
            (block.norm, lambda *_: found.append(block.up.weight.requires_grad)),
        ):
            handle = layer.register_forward_pre_hook(hook)
            with torch.no_grad():
                s.model(batch(0))
            handle.remove()
        found.append(of_group.requires_grad)
    return found


def frozen_inside_and_trained_after(mesh: Any) -> bool:
    """A call between passes leaves the flag that was set after the forward."""
    s = started(mesh)
    block = s.model.blocks[0]
    handle = s.model.norm.register_forward_pre_hook(lambda *_: block.up.requires_grad_(False) and None)
    with torch.no_grad():
        s.model(batch(0))
    handle.remove()
    block.up.requires_grad_(True)
    s.model.state_dict()
    return block.up.weight.requires_grad


def test_a_matrix_frozen_in_a_forward_may_train_again_after_it(ranks):
    assert ranks.run(frozen_inside_and_trained_after, (2,)) == [True] * 2


@pytest.mark.parametrize("by", ["the group's", "the module's"])
def test_a_matrix_frozen_in_a_forward_stays_frozen_and_the_same_undone(ranks, by):
    assert ranks.run(frozen_inside, (2,), by=by) == [[False, False, True, True]] * 2
