"""Programs that use dmuon wrongly, and what the error must say; each raises on every rank, and the processes go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch.nn as nn
from models import batch, is_matrix_of_a_block, loss_of, make_gpt, part, weights_of_plain
from reference import ReferenceMuon
from scenario import Session, assert_equal_to_reference
from training import AHEAD, LR, WEIGHT_DECAY, dedicate, place_of, weights_of

import dmuon

Program = TypeVar("Program", bound=Callable[..., None])


class Refusals(list[Any]):
    """The cases of a test module, for `pytest.mark.parametrize(REFUSED, ...)`, in the order of their programs."""

    def __call__(self, *words: str, **options: Any) -> Callable[[Program], Program]:
        """`@refused(*words, **options)` above a program: with these options its error has these words on every rank."""

        def add(program: Program) -> Program:
            values = [f"{name}={value!r}" for name, value in options.items()]
            self.append(pytest.param(program, options, words, id=f"{program.__name__}({', '.join(values)})"))
            return program

        return add


REFUSED = ("program", "options", "words")


def attempt(mesh: Any, program: Callable[..., None], options: dict[str, Any], goes_on: bool = True) -> str:
    """The ValueError's message; if asked, after one good step, which proves that the process can go on."""
    try:
        program(mesh, **options)
    except ValueError as error:
        message = str(error)
    else:
        raise AssertionError(f"{program.__name__}: no error")
    if goes_on and mesh.ndim <= 2:
        s = Session(mesh, AHEAD)
        s.start(make_gpt(depth=1))
        s.train(0)
    return message


def messages_of(pool: Any, program: Callable[..., None], mesh: tuple[int, ...] = (2, 2), **options: Any) -> list[str]:
    """What each rank's ValueError says."""
    return list(pool.run(attempt, mesh, program=program, options=options))


_gone_on: set[tuple[Callable[..., None], tuple[str, ...]]] = set()


def expect_refusal(pool: Any, program: Callable[..., None], options: dict[str, Any], words: tuple[str, ...]) -> None:
    """A good step follows the first refusal of a program with these words."""
    assert words
    goes_on = (program, words) not in _gone_on
    _gone_on.add((program, words))
    for message in pool.run(attempt, (2, 2), program=program, options=options, goes_on=goes_on):
        for word in words:
            assert word in message


def dedicated(mesh: Any, **options: Any) -> nn.Module:
    """A model between dedicate_params and what has to follow it."""
    model = make_gpt(depth=1)
    dedicate(model, mesh, AHEAD, **options)
    return model


def ready(mesh: Any, fsdp: bool = True) -> tuple[nn.Module, dmuon.Muon]:
    """A model that has been trained for a step, and its optimizer."""
    s = Session(mesh, AHEAD)
    model = s.start(make_gpt(depth=2), **({} if fsdp else {"units": None}))
    s.train(0)
    return model, s.opt


def with_gradients(mesh: Any, fsdp: bool = True) -> tuple[nn.Module, dmuon.Muon]:
    """Likewise, after the backward of the second step."""
    model, opt = ready(mesh, fsdp)
    loss_of(model, batch(1)).backward()
    return model, opt


def trains_on_exactly(mesh: Any, model: nn.Module, opt: dmuon.Muon) -> None:
    """Asserts that two steps of make_gpt(depth=1), with LR and WEIGHT_DECAY, end at the reference's weights."""
    rank, size = place_of(mesh)
    plain = make_gpt(depth=1)
    initial = weights_of_plain(plain)
    names = [name for name, p in plain.named_parameters() if is_matrix_of_a_block(name, p)]
    reference = ReferenceMuon(plain, names, LR, WEIGHT_DECAY)
    for step in range(2):
        for one in range(size):
            (loss_of(plain, part(batch(step), one, size)) / size).backward()
        loss_of(model, part(batch(step), rank, size)).backward()
        reference.step()
        reference.zero_grad()
        opt.step()
        opt.zero_grad()
    assert_equal_to_reference(initial, weights_of_plain(plain), weights_of(model))


def rank_of(mesh: Any) -> int:
    return place_of(mesh)[0]
