"""Plays a program for one of the sides."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from after import Values
from model import Net, inputs_of
from program import Micro, Pass, Program, Step
from sides import Side, batch_of


class OwnError(Exception):
    """What a rank raises that goes astray so."""


@dataclass(frozen=True)
class Reading:
    """What was read of one of the models."""

    number: int  # of the model
    values: Values
    where: str


class Outcome(NamedTuple):
    initial: list[Values]  # the weights of each model
    readings: list[Reading]
    notes: dict[int, list[float]]  # by rank


class Player:
    def __init__(self, program: Program, side: Side) -> None:
        self.program, self.side = program, side
        self.step, self.micro = 0, 0
        self.scales = False  # whether this step has a GradScaler
        # By rank: what its forwards and its clipping returned, in order. Read in the end: a host that reads has waited.
        self.notes: dict[int, list[torch.Tensor]] = {rank: [] for rank in side.ranks}
        self.initial = [side.weights(model) for model in side.models]
        self.readings: list[Reading] = []  # the weights in the end, too

    def play(self) -> None:
        program = self.program
        for self.step, step in enumerate(program.steps):
            if program.astray and self.step == program.stray_step and program.stray in self.side.ranks:
                step = self.go_astray(step)
            self.take(step)

    def outcome(self) -> Outcome:
        final = map(self.side.weights, self.side.models)
        self.readings += [Reading(number, weights, "in the end") for number, weights in enumerate(final)]
        return Outcome(
            [on_host(weights) for weights in self.initial],
            [replace(reading, values=on_host(reading.values)) for reading in self.readings],
            {rank: [float(value) for value in notes] for rank, notes in self.notes.items()},
        )

    def go_astray(self, step: Step) -> Step:
        """The step that the stray rank takes instead."""
        how, first = self.program.astray, step.micros[0]
        uses = first.forward.uses
        if how == "raises":
            raise OwnError("this rank alone")
        if how == "evaluates":
            self.run(Micro(evaluation="no_grad", evaluated=first.forward, forward=first.forward, backward="dropped"))
        if how == "adds":
            self.run(first)
        if how == "saves":
            self.side.weights(self.side.models[0])
        if how in ("reorders", "repeats"):
            first = replace(first, forward=Pass(uses[::-1] if how == "reorders" else (*uses, uses[-1])))
        if how == "no backward":
            first = replace(first, backward="dropped")
        if how == "no_sync":
            first = replace(first, synced=False)
        step = replace(step, micros=(first, *step.micros[1:]))
        return replace(step, clips=step.clips != (how == "clips"), ends="discarded" if how == "no step" else step.ends)

    def take(self, step: Step) -> None:
        frozen = [
            parameter
            for model in self.side.models
            for index in step.frozen
            for parameter in model.blocks[index].parameters()
            if parameter.requires_grad
        ]
        for parameter in frozen:
            parameter.requires_grad_(False)
        closes = step.ends == "closure"
        self.scales = step.scaled
        for self.micro, micro in enumerate(step.micros[: -1 if closes else None]):
            self.run(micro)
        self.micro = len(step.micros) - 1
        if step.clips and not closes:
            for model, optimizer in zip(self.side.models, self.side.optimizers, strict=True):
                if step.scaled:
                    self.side.unscale(optimizer)
                self.note_all(self.side.clip(model))
        self.end(step, closes)
        for parameter in frozen:
            parameter.requires_grad_(True)
        self.do(step.after[: step.cleared_after])
        for optimizer in self.side.optimizers:
            optimizer.zero_grad(set_to_none=not step.zeroed or step.reloads)
        self.do(step.after[step.cleared_after :])
        for model in self.side.models if step.off else ():
            self.side.set_flag(model, step.off, True)
        if step.reloads:
            self.side.reload()

    def end(self, step: Step, closes: bool) -> None:
        if step.ends == "discarded":
            return
        for number, (model, optimizer) in enumerate(zip(self.side.models, self.side.optimizers, strict=True)):

            def closure(number: int = number, model: Net = model) -> float:
                self.run_one(step.micros[-1], number, model)
                if step.clips:
                    self.note_all(self.side.clip(model))
                return 0.0

            if closes and isinstance(optimizer, torch.optim.Optimizer):
                optimizer.step(closure)
            else:
                if closes:
                    closure()
                if step.scaled:
                    self.side.step_scaled(optimizer)
                else:
                    optimizer.step()

    def do(self, actions: Sequence[str]) -> None:
        """What comes after a step."""
        for action in actions:
            for number, after in enumerate(self.side.after):
                found = getattr(after, action)()
                if isinstance(found, torch.Tensor):
                    self.note_all(found)
                elif found is not None:
                    self.readings.append(Reading(number, found, f"step {self.step}, {action}"))

    def run(self, micro: Micro) -> None:
        """A micro-step of all models."""
        models = list(enumerate(self.side.models))
        if self.program.second in ("", "in turn"):
            for number, model in models:
                self.run_one(micro, number, model)
            return
        for number, model in models:
            self.evaluate(micro, number, model)
            self.set_flag(model)
        with ExitStack() as stack:
            if not micro.synced:
                for model in self.side.models:
                    stack.enter_context(self.side.no_sync(model))
            for rank in self.side.ranks:
                losses = [self.losses(micro, number, model, rank) for number, model in models]
                if self.program.second == "joint":
                    losses = [[loss for pair in losses for loss in pair]]
                for pair in losses:
                    self.backward(micro, pair, rank, self.side.models)
        for number, _ in models:
            self.zero(micro, number)

    def run_one(self, micro: Micro, number: int, model: Net) -> None:
        self.evaluate(micro, number, model)
        self.set_flag(model)
        with ExitStack() as stack:
            if not micro.synced:
                stack.enter_context(self.side.no_sync(model))
            for rank in self.side.ranks:
                self.backward(micro, self.losses(micro, number, model, rank), rank, [model])
        self.zero(micro, number)

    def set_flag(self, model: Net) -> None:
        step = self.program.steps[self.step]
        if step.off:
            self.side.set_flag(model, step.off, self.micro == len(step.micros) - 1 and not step.stays_off)

    def zero(self, micro: Micro, number: int) -> None:
        if micro.zeroed:
            self.side.optimizers[number].zero_grad(set_to_none=False)

    def evaluate(self, micro: Micro, number: int, model: Net) -> None:
        if micro.evaluation:
            with torch.no_grad() if micro.evaluation == "no_grad" else torch.inference_mode():
                for rank in self.side.ranks:
                    self.note(rank, self.forward(model, micro.evaluated, rank, number).square().mean())

    def losses(self, micro: Micro, number: int, model: Net, rank: int) -> list[torch.Tensor]:
        """The terms of one rank's loss."""
        if micro.backward == "thrown away":
            self.forward(model, micro.forward, rank, number)
        output = self.forward(model, micro.forward, rank, number)
        target = self.batch(rank, number)[:, :2]
        terms = [(output - target.sin()).square().mean()]
        if micro.backward == "two losses":
            terms.append(0.3 * output.sin().mean())
        if micro.backward == "two forwards":
            terms[0] = terms[0] + 0.5 * self.forward(model, micro.forward, rank, number + 2).square().mean()
        for term in terms:
            self.note(rank, term)
        losses = [term * self.side.scale() for term in terms]
        return [self.side.scaled(loss) for loss in losses] if self.scales else losses

    def forward(self, model: Net, chosen: Pass, rank: int, number: int) -> torch.Tensor:
        return model(self.batch(rank, number), chosen.of(rank))  # type: ignore[no-any-return]

    def batch(self, rank: int, number: int) -> torch.Tensor:
        return batch_of(self.step, self.micro, rank, number).to(self.side.device, self.side.dtype, non_blocking=True)

    def backward(self, micro: Micro, losses: list[torch.Tensor], rank: int, models: list[Net]) -> None:
        if micro.backward == "inputs":
            uses = micro.forward.of(rank)
            inputs = [tensor for model in models for tensor in inputs_of(model, self.program, uses)]
            torch.autograd.backward(losses, inputs=inputs or None)
            return
        if micro.backward == "dropped" or rank in micro.without_backward:
            return
        if micro.backward == "retained":
            torch.autograd.backward(losses, retain_graph=True)
        torch.autograd.backward(losses)

    def note(self, rank: int, value: torch.Tensor) -> None:
        self.notes[rank].append(value.detach().clone())

    def note_all(self, value: torch.Tensor) -> None:
        for notes in self.notes.values():
            notes.append(value)


def on_host(values: Values) -> Values:
    return {name: value.cpu() for name, value in values.items()}


def play(program: Program, side: Side) -> Outcome:
    player = Player(program, side)
    player.play()
    return player.outcome()
