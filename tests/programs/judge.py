"""Plays a program on ranks and holds it to the contract."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import torch
from contract import FSDP2S_OWN, may_train, refusal
from play import Outcome, OwnError, play
from pool import RankFailed, RankPool
from program import Program
from sides import Dmuon, Reference, Stock
from torch.distributed.device_mesh import DeviceMesh

# Of what a weight moved. Programs are smooth (model.py, ADAMW_EPS), so errors are 1e-6 .. 1e-4 of it.
BOUND = 1e-3
# Times the reference's own sensitivity to a rounding.
TIMES = 50
MOST_UNSURE = 0.05  # the bound of a weight, relative to what it moved
ANSWER_S = 30.0  # a program takes a second
REFUSE_S = 60.0  # usually 1 to 6; a timeout takes minutes


class Outside(AssertionError):
    """A program outside of the contract."""


def on_ranks(mesh: Any, program: Program, side: str) -> Outcome:
    if program.order:
        table = torch.tensor(program.order).view(program.mesh)
        mesh = DeviceMesh(mesh.device_type, table, mesh_dim_names=mesh.mesh_dim_names)
    if side == "stock":
        return play(program, Stock(mesh, program))
    chosen = (program.options, program.others) if side == "options" else (program.others, program.options)
    return play(program, Dmuon(mesh, program, *chosen))


def play_on(pool: RankPool, program: Program, side: str) -> list[Outcome]:
    """The outcomes by place on the mesh."""
    outcomes = pool.run(on_ranks, program.mesh, program=program, side=side)
    return [outcomes[rank] for rank in program.order or range(program.size)]


class Truth:
    """What one process makes of a program, and how sure that is."""

    def __init__(self, program: Program, muon: bool = True) -> None:
        self.exact = play(program, Reference(program, torch.float64, muon=muon))
        # A change of any size may change what a weight is rounded to in bf16.
        nudges = (0.0, 1e-7) if program.dtype == "fp32" else (0.0,)
        others = [play(program, Reference(program, torch.float32, nudge, muon)) for nudge in nudges]
        self.least_sure = 0.0
        self.bounds: list[dict[str, float]] = []
        self.notes = self.exact.notes
        for place, reading in enumerate(self.exact.readings):
            self.bounds.append({})
            for name, value in reading.values.items():
                begun = self.exact.initial[reading.number].get(name)  # a momentum begins with zeros
                moved = float((value if begun is None else value - begun).norm())
                swing = max(float((other.readings[place].values[name] - value).norm()) for other in others)
                self.bounds[place][name] = BOUND * moved + TIMES * swing
                if moved:
                    self.least_sure = max(self.least_sure, TIMES * swing / moved)
        self.note_bound = BOUND + TIMES * max(
            (abs(a - b) for other in others for rank in self.notes for a, b in self.pairs(other, rank)), default=0.0
        )

    def pairs(self, other: Outcome, rank: int) -> list[tuple[float, float]]:
        return list(zip(self.notes[rank], other.notes[rank], strict=True))

    def check_all(self, outcomes: list[Outcome]) -> None:
        """Those of all ranks, which must not differ in any bit."""
        for rank, outcome in enumerate(outcomes):
            self.check(outcome, rank)
            check_same_bits(outcomes[0], outcome, f"on rank {rank} than on rank 0")

    def check(self, outcome: Outcome, rank: int) -> None:
        for wanted, got, bounds in zip(self.exact.readings, outcome.readings, self.bounds, strict=True):
            assert got.values.keys() == bounds.keys(), (got.where, got.values.keys() ^ bounds.keys())
            for name, bound in bounds.items():
                error = float((got.values[name] - wanted.values[name]).norm())
                if not error <= bound:
                    where = f"rank {rank}, model {got.number}, {got.where}"
                    raise Outside(f"{where}, {name}: off by {error:.2e}, allowed {bound:.2e}")
        for place, (expected, found) in enumerate(self.pairs(outcome, rank)):
            if not abs(expected - found) <= self.note_bound * (1 + abs(expected)):
                raise Outside(f"rank {rank}: loss or norm number {place}: expected {expected:.6f}, got {found:.6f}")


def check_same_bits(first: Outcome, second: Outcome, where: str) -> None:
    for one, other in zip(first.readings, second.readings, strict=True):
        for name, value in one.values.items():
            if not torch.equal(value, other.values[name]):
                raise Outside(f"model {one.number}, {one.where}, {name}: other bits {where}")


def check(pool: RankPool, program: Program) -> None:
    """Raises Outside."""
    reason = refusal(program)
    if reason:
        check_refused(pool, program, reason)
        return
    truth = Truth(program)
    if truth.least_sure > MOST_UNSURE:
        raise Outside("draws and models are made so that the truth is known: mend them")
    try:
        outcomes = play_on(pool, program, "options")
        others = play_on(pool, program, "others")
    except RankFailed as error:
        raise Outside(f"is to be trained, but failed:\n{error}") from None
    truth.check_all(outcomes)
    if same_bits(program):
        check_same_bits(outcomes[0], others[0], "with other options")
    else:
        truth.check_all(others)


def same_bits(program: Program) -> bool:
    """Whether other options give them: the norm of clipping adds up the norms of what has an owner of its own."""
    clips = any(step.clips or "clip_again" in step.after for step in program.steps)
    return not clips or program.options.division == program.others.division


def check_refused(pool: RankPool, program: Program, reason: str) -> None:
    try:
        outcomes = play_on(pool, program, "options")
    except RankFailed as error:
        seconds = time.monotonic() - pool.met
        parts = re.split(r"--- rank \d+ ---\n", str(error))[1:]
        if len(parts) < program.size:
            raise Outside(f"{len(parts)} of {program.size} ranks refused ({reason}):\n{error}") from None
        check_names(program, parts, reason)
        if seconds > REFUSE_S:
            raise Outside(f"refused after {seconds:.0f} s ({reason})") from None
        return
    if not may_train(reason):
        raise Outside(f"is to be refused, but was trained: {reason}")
    Truth(program).check_all(outcomes)


def check_names(program: Program, parts: list[str], reason: str) -> None:
    """Every rank's error says that it is dmuon's; waits inside FSDP2 end with their connections."""
    named = ["Error: dmuon: "]
    if reason in FSDP2S_OWN:
        named.append(FSDP2S_OWN[reason])
    if program.astray == "raises":
        named.append(f"{OwnError.__name__}: ")
    ends = [] if program.wrap == "none" else ["Connection (closed|reset) by peer|pair closure"]
    errors = [re.split(r"\n(?=\S*Error: )", part)[-1] for part in parts]
    for error in errors:
        if not re.search("|".join(named + ends), error):
            raise Outside(f"refused, but not by name ({reason}): {error}")
    if not any(re.search("|".join(named), error) for error in errors):
        raise Outside(f"refused, but on no rank by name ({reason}): {errors[0]}")


def check_stock(pool: RankPool, program: Program) -> None:
    """Whether FSDP2 with AdamW, without dmuon, trains it as one process does."""
    program = replace(program, steps=tuple(replace(step, after=()) for step in program.steps))
    truth = Truth(program, muon=False)
    try:
        outcomes = play_on(pool, program, "stock")
    except RankFailed as error:
        raise Outside(f"stock FSDP2 failed:\n{error}") from None
    truth.check_all(outcomes)
