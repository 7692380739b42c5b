"""Reads and writes between a step and the next forward, while the update of the step may still run."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from dmuon._setup.dedication import dedication_of
from dmuon._setup.place import clean_name
from dmuon._setup.placeholder import OwnedTensor

import dmuon

# Methods of After, see there.
READS = ("weights", "iterated", "model_state", "momenta", "states", "mean", "shown_mean")
NORMS = ("weight_norms", "gradient_norms", "clip_again")
WRITES = ("new_mean", "update_mean", "negate", "save", "load_model", "load_optimizer", "change_rates", "step_again")
OTHERS = ("offload", "verify")
ACTIONS = (*READS, *NORMS, *WRITES, *OTHERS)
# What only gradients that all ranks agree on may be used for.
AGREES = ("gradient_norms", "clip_again", "step_again")
DECAY = 0.5  # of a mean
LEAST_NORM = 0.02  # for gradients that are clipped already

Values = dict[str, torch.Tensor]  # by name


def norm_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    squares = [tensor.double().square().sum() for tensor in tensors]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


class After:
    """What the program does with one of its models, here of a Reference.

    A method returns what it has read: values by name, or one norm.
    """

    saved: Any = None
    held: Any = None  # the mean

    def __init__(self, side: Any, number: int) -> None:
        self.side, self.number = side, number

    @property
    def model(self) -> Any:
        return self.side.models[self.number]

    @property
    def optimizer(self) -> Any:
        return self.side.optimizers[self.number]

    def weights(self) -> Values:
        return self.side.weights(self.model)  # type: ignore[no-any-return]

    iterated = model_state = weight_norms = weights

    def momenta(self) -> Values:
        return {f"momentum of {name}": buffer.clone() for name, buffer in self.optimizer.buffers.items()}

    states = momenta

    def gradient_norms(self) -> torch.Tensor:
        return norm_of(p.grad for p in self.optimizer.matrices.values() if p.grad is not None)

    def clip_again(self) -> torch.Tensor:
        return self.side.clip(self.model, LEAST_NORM)  # type: ignore[no-any-return]

    def new_mean(self) -> None:
        self.held = {n: p.detach().clone() for n, p in self.master.named_parameters() if p.requires_grad}

    def update_mean(self) -> None:
        self.require_mean()
        for name, weight in self.master.named_parameters():
            if name in self.held:
                self.held[name].lerp_(weight.detach(), 1 - DECAY)

    def mean(self) -> Values:
        self.require_mean()
        return {clean_name(name): value.clone() for name, value in self.held.items()}

    def shown_mean(self) -> Values:
        return {**self.weights(), **self.mean()}

    def require_mean(self) -> None:
        if self.held is None:
            self.new_mean()

    def negate(self) -> None:
        """Writes values that are as exact as those before."""
        with torch.no_grad():
            for parameter in self.master.parameters():
                parameter.neg_()

    def save(self) -> None:
        optimizer = self.optimizer
        adamw = optimizer.adamw.state_dict() if optimizer.adamw else None
        self.saved = copy.deepcopy((self.master.state_dict(), optimizer.buffers, adamw, self.rates()))

    def load_model(self) -> None:
        self.require_saved()
        self.master.load_state_dict(self.saved[0])

    def load_optimizer(self) -> None:
        self.require_saved()
        optimizer = self.optimizer
        _, optimizer.buffers, adamw, rates = copy.deepcopy(self.saved)
        vars(optimizer).update(rates)
        if optimizer.adamw:
            optimizer.adamw.load_state_dict(adamw)

    def require_saved(self) -> None:
        if self.saved is None:
            self.save()

    def change_rates(self) -> None:
        """So much that a step by rates of another step is seen."""
        for rates in (vars(self.optimizer), *self.optimizer.own.values()):
            change(rates)

    def rates(self) -> dict[str, Any]:
        return {name: getattr(self.optimizer, name) for name in ("lr", "weight_decay", "momentum", "own")}

    def step_again(self) -> None:
        self.optimizer.step()

    def offload(self) -> None:
        """Moves memory to the host and back."""

    def verify(self) -> None:
        self.optimizer.zero_grad()

    @property
    def master(self) -> Any:
        return self.side.master(self.model)


def change(rates: dict[str, Any]) -> None:
    for name, factor in {"lr": 0.5, "weight_decay": 1.5, "momentum": 0.9}.items():
        if isinstance(rates.get(name), torch.Tensor):
            rates[name].mul_(factor)
        elif name in rates:
            rates[name] *= factor


class AfterOnRanks(After):
    """By dmuon."""

    def iterated(self) -> Values:
        found = {name: weight.clone() for name, weight in dmuon.iter_full_params(self.model)}
        weights = self.weights()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name].to(found[name].dtype)) for name in found), "old weights"
        return weights

    def model_state(self) -> Values:
        names = {clean_name(name) for name, _ in self.model.named_parameters()}  # a tied one has several in a state
        return {name: whole(value) for name, value in self.model.state_dict().items() if name in names}

    def weight_norms(self) -> Values:
        norms, weights = dmuon.weight_norms(self.model), self.weights()
        assert all(torch.allclose(norm, weights[name].norm(), 1e-5) for name, norm in norms.items()), "old norms"
        return weights

    def momenta(self) -> Values:
        names = {p: name for name, p in self.model.named_parameters()}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {
            f"momentum of {names[parameters[number]]}": whole(state["momentum_buffer"])
            for number, state in self.optimizer.state_dict()["state"].items()
            if "momentum_buffer" in state
        }

    def states(self) -> Values:
        """Those of this rank first, at once and when nothing is under way any more."""
        early = self.own_states()
        dedication_of(self.model, "states").runtime.engine.drain()
        assert all(map(torch.equal, early, self.own_states())), "opt.state did not wait for the update"
        return self.momenta()

    def own_states(self) -> list[torch.Tensor]:
        states = (state for p, state in self.optimizer.state.items() if isinstance(p, OwnedTensor))
        return [t.clone() for state in states for t in state.values() if not isinstance(t, OwnedTensor)]

    def gradient_norms(self) -> torch.Tensor:
        return norm_of(dmuon.grad_norms(self.model).values())

    def new_mean(self) -> None:
        self.held = None  # the old one goes while the update may run
        self.held = dmuon.Ema(self.model, DECAY)

    def update_mean(self) -> None:
        self.require_mean()
        self.held.update()

    def mean(self) -> Values:
        self.require_mean()
        return {name: whole(value) for name, value in self.held.state_dict()["weights"].items()}

    def shown_mean(self) -> Values:
        self.require_mean()
        with self.held.applied():
            return self.weights()

    def negate(self) -> None:
        with dmuon.full_params(self.model, writeback=True):
            super().negate()

    def save(self) -> None:
        self.saved = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load_model(self) -> None:
        self.require_saved()
        self.model.load_state_dict(self.saved[0])

    def load_optimizer(self) -> None:
        self.require_saved()
        self.optimizer.load_state_dict(copy.deepcopy(self.saved[1]))

    def change_rates(self) -> None:
        for group in self.optimizer.param_groups:
            if group["algorithm"] == "muon":
                change(group)

    def offload(self) -> None:
        dmuon.offload(self.model)
        dmuon.load(self.model)

    def verify(self) -> None:
        super().verify()
        found = dmuon.verify(self.model, self.optimizer)
        assert found, str(found)

    @property
    def master(self) -> nn.Module:
        return self.model  # type: ignore[no-any-return]


def whole(value: Any) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()  # type: ignore[no-any-return]
