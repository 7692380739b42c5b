"""What happens between forward, backward and step."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn as nn
from composition_cases import _Matrices, square_loss
from models import batch, loss_of, make_gpt
from scenario import LR, Session, language_loss

import dmuon


def evaluation(s: Session) -> None:
    model = s.start(make_gpt(depth=2))
    tokens = batch(77)

    def evaluate() -> float:
        model.eval()
        with torch.no_grad():
            loss = float(loss_of(model, tokens))
        model.train()
        return loss

    s.notes.append(evaluate())  # before the first step
    for step in range(3):
        s.train(step)
        s.notes.append(evaluate())
        with torch.inference_mode():
            s.notes.append(float(loss_of(model, tokens)))
        s.notes.append(evaluate())


def dropped_graph(s: Session) -> None:
    model = s.start(make_gpt(depth=2))
    loss_of(model, batch(50))
    s.train(0)
    for step in (1, 2):
        loss_of(model, batch(50 + step))
        kept = loss_of(model, batch(60 + step))
        s.train(step)
        del kept


def cleared_gradients(s: Session, by: str) -> None:
    """A backward whose gradients are thrown away, in the first step and in the second."""
    s.start(make_gpt(depth=2))
    for step in (0, 1, 2):
        s.backward(language_loss(90 + step, s.size))
        if s.reference or by == "opt":
            s.opt.zero_grad()
        else:
            s.model.zero_grad(set_to_none=by == "model")
        s.train(step)


class _Boom(Exception):
    pass


def _explode(gradient: torch.Tensor) -> None:
    raise _Boom


def _plant(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(_explode)


def raised_backward(s: Session, first: bool, clear: bool) -> None:
    """Plain replicas: a backward that raises half-way on every rank, then good steps."""
    s.start(make_gpt(depth=3), units=None)
    if not first:
        s.train(0)
    if not s.reference:
        handle = s.model.blocks[1].register_forward_hook(_plant)
        try:
            s.backward(language_loss(99, s.size))
            raise AssertionError("the backward did not raise")
        except _Boom:
            pass
        handle.remove()
        s.opt.zero_grad() if clear else s.model.zero_grad()
    s.train(1, 2)


def missing_gradients(s: Session, ranks: tuple[int, ...]) -> None:
    """The matrix blocks.1 has no gradient on some ranks; on all of them it is left alone."""
    torch.manual_seed(0)
    s.start(_Branches(), units=lambda m: [])
    for step in range(4):
        skip = ranks if step in (1, 2) else ()
        s.backward(_branch_loss(step, skip))
        s.step()
        if step in (0, 2):
            s.notes.append(_momentum(s, "blocks.1.second.weight"))


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 10, bias=False)
        self.second = nn.Linear(10, 10, bias=False)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Branch() for _ in range(3))

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, skip and i == 1)
        return x


class _Branch(_Two):
    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return x + y if skip else x + self.second(y)


def _branch_loss(step: int, skip: tuple[int, ...]) -> Any:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        x = torch.randn(5, 10, generator=torch.Generator().manual_seed(100 * step + rank))
        return (model(x, rank in skip) - x.sin()).square().mean()

    return loss


def _momentum(s: Session, name: str) -> Any:
    if s.reference:
        return s.opt.buffers[name].clone()
    state = s.opt.state[dict(s.model.named_parameters())[name]]
    return state["momentum_buffer"].clone() if "momentum_buffer" in state else None


def toggled_requires_grad(s: Session) -> None:
    s.start(make_gpt(depth=2), units=None)
    for step in range(4):
        frozen = step in (1, 2)
        s.model.blocks[0].up.weight.requires_grad_(not frozen)
        s.model.blocks[1].requires_grad_(step != 2)
        s.train(step)


def two_backwards(s: Session) -> None:
    s.start(make_gpt(depth=2))
    for step in range(3):
        for rank in s.each_rank():
            loss = language_loss(step, s.size)(s.model, rank) / (s.size if s.reference else 1)
            loss.backward(retain_graph=True)
            (3 * loss).backward()
        s.step()


def gradient_of_the_input(s: Session) -> None:
    """autograd.grad with respect to the input alone leaves the parameters' gradients as they are."""
    torch.manual_seed(0)
    s.start(_Matrices([10, 8, 6, 1]), units=None)
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(5), requires_grad=True)
    for step in range(3):
        (gradient,) = torch.autograd.grad(s.model(x).sum(), x)
        s.notes.append(gradient.clone())
        s.backward(square_loss(step))
        (gradient,) = torch.autograd.grad(s.model(x).sum(), x)
        s.notes.append(gradient.clone())
        s.step()


def non_finite(s: Session, value: float, where: str) -> None:
    """A bad gradient on one rank in the second step, which then never was."""
    s.start(make_gpt(depth=2))
    s.train(0)
    if not s.reference:
        before, parameter = s.weights(), where
        bad = s.rank == 2

        def poison(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output * torch.tensor(value) if bad else output

        module = s.model.get_submodule(parameter)
        handle = module.register_forward_hook(poison)
        s.backward(language_loss(5, s.size))
        norm = float(dmuon.clip_grad_norm_(s.model, 1.0)) if where == "head" else float("nan")
        s.step()
        handle.remove()
        after = s.weights()
        s.notes.append((s.opt.skipped_steps, norm, all(torch.equal(before[n], after[n]) for n in before)))
    s.train(1, 2)
    if not s.reference:
        s.notes.append(s.opt.skipped_steps)


def clipped(s: Session, max_norm: float, units: bool = True) -> None:
    s.start(make_gpt(depth=2), **({} if units else {"units": None}))
    for step in range(3):
        for micro in range(2):
            s.backward(language_loss(10 * step + micro, s.size), scale=10.0)
        s.clip(max_norm)
        s.clip(max_norm)  # again: the verdict is kept, and scaled
        s.step()


def identical(mesh: Any) -> Any:
    """Two runs in one process."""
    runs = []
    for _ in range(2):
        s = Session(mesh)
        s.start(make_gpt(depth=2))
        s.train(0, 1, 2)
        runs.append(s.weights())
    return [n for n, w in runs[0].items() if not torch.equal(w, runs[1][n])]


def bf16_quintic(s: Session) -> None:
    """As torch.optim.Muon has it."""
    s.start(
        make_gpt(depth=1),
        muon={} if s.reference else {"ns_coefficients": "quintic", "ns_dtype": torch.bfloat16, "lr": LR},
    )
    s.train(0, 1, 2)


def warnings_of_unfrozen(mesh: Any, add: bool) -> list[str]:
    """What dmuon logs in three steps when a layer that was frozen at set-up is unfrozen after the first."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    model = make_gpt(depth=2)
    model.blocks[1].requires_grad_(False)
    dmuon.dedicate_params(model, mesh)
    opt = dmuon.Muon(model)
    logging.getLogger("dmuon").addHandler(handler)
    for step in range(3):
        if step == 1:
            model.blocks[1].requires_grad_(True)
            if add:
                opt.add_param_group({"params": list(model.blocks[1].parameters())})
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    logging.getLogger("dmuon").removeHandler(handler)
    return [message for message in messages if "frozen" in message]
