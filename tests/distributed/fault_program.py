"""A training program on one of four ranks, and what goes wrong on another at a chosen point of a chosen step."""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import gc
import json
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from dmuon._setup import groups, new_groups
from models import Gpt, batch, loss_of, part
from pool import make_mesh, use_emulated_device
from scenario import Session
from training import AHEAD

import dmuon

NUM_RANKS = 4
TIMEOUT_S = 5.0  # where a rank sleeps or dies: it cannot tell
PATIENCE_S = 180.0  # where it goes astray or raises: longer than the test waits
NAP_S = 2 * TIMEOUT_S
STAY_S = 20 * TIMEOUT_S  # more than the others have
DEPTH = 3
STEPS_AFTER = 3  # that would follow if nobody noticed

# "enters" and "computes" lie before and after dmuon's trigger of a use, "computed" and "leaves" around its end;
# "gradient comes" and "backward begins", "backward ends" and "gradient left" likewise in a backward.
FORWARD_OF_BLOCK = ("enters", "computes", "computed", "leaves")
IN_A_PASS = (
    "forward begins",
    *(f"block {block} {moment}" for block in range(DEPTH) for moment in FORWARD_OF_BLOCK),
    "loss is there",
    *(
        f"block {block} {moment}"
        for block in reversed(range(DEPTH))
        for moment in ("gradient comes", "backward begins", "backward ends")
    ),
    "block 0 gradient left",
    "backward is over",
)
BEFORE_AGREEMENT = "step begins"
AFTER_AGREEMENT = ("clipped", "AdamW begins", "step ends", "gradients cleared")
POINTS = (*IN_A_PASS, BEFORE_AGREEMENT, *AFTER_AGREEMENT)


# The blocks that the victim's forward uses, in a step that the others replay.
DEVIATIONS = {"reorders": [1, 0, 2], "repeats": [0, 1, 1, 2]}
SWAPS = ("trains in opposite order", "computes in opposite order", "steps in opposite order")  # its two models
# What the victim calls by itself before a step, as in `if rank == 0:`, and what errors then say of it.
ALONE = {"full_params": "waits for full_params in step 3", "evaluates": "evaluation forwards so far "}


@dataclasses.dataclass(frozen=True)
class Case:
    """What happens on one rank: "dies", "raises" or "sleeps" at a point; or one of DEVIATIONS, SWAPS or ALONE.

    The other ranks must notice and end with the exception.
    """

    fault: str
    point: str = ""
    step: int = 2  # 0 is traced
    micro: int = 0  # of which pass, for points in a pass
    victim: int = 1
    mesh: tuple[int, ...] = (2, 2)
    fsdp: bool = False
    lookahead: int = 2
    micro_steps: int = 1
    clips: bool = False
    insists: bool = False  # the others catch the exception and train on, which must fail at once or in time
    drops: bool = False  # all free the model first, and with it what is in flight
    lingers: bool = False  # the others stay for a while: nobody learns from a closed connection that they gave up
    evaluated: bool = False  # all ranks have evaluated before
    stays: bool = False  # the victim's process outlives its program, so that no connection closes before the others end
    silent: bool = False  # no message of the device times out
    listed: bool = False  # no unit stands for the root: see Listed
    device: str = "cpu"  # or "emulated", which blocks the host only where this reads what the device computes

    @property
    def most_steps(self) -> int:
        """How many optimizer steps the others may complete: those that all ranks had agreed on."""
        agreed = self.point in AFTER_AGREEMENT or (self.clips and self.point == BEFORE_AGREEMENT)
        return self.step + agreed

    @property
    def timeout(self) -> datetime.timedelta:
        """Of every process group."""
        return datetime.timedelta(seconds=TIMEOUT_S if self.fault in ("sleeps", "dies") else PATIENCE_S)

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        what = [self.fault, f"rank {self.victim} of {mesh}", f"step {self.step}.{self.micro}", self.point]
        what += ["fsdp" if self.fsdp else "plain", f"lookahead {self.lookahead}"]
        words = ("insists", "drops", "lingers", "evaluated", "stays", "silent", "listed")
        what += [word for word in words if getattr(self, word)]
        what += [self.device] if self.device != "cpu" else []
        return ", ".join(word for word in what if word)


class OwnFault(Exception):
    """What the victim raises."""


class Ordered(Gpt):
    """Uses blocks in `order`, which may change."""

    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__(depth=depth)
        self.order = list(range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedding, norm, head = self.outside()
        x = embedding(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        return head(norm(x))

    def outside(self) -> Sequence[nn.Module]:
        return self.embedding, self.norm, self.head


class Listed(Ordered):
    """Embedding, norm and head are items of a list, so they are units of their own. FSDP2 gathers for the root."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.ModuleList([self.embedding, self.norm, self.head])
        del self.embedding, self.norm, self.head

    def outside(self) -> Sequence[nn.Module]:
        return [*self.ends]


class Program:
    """The training program of one rank; every rank has the same hooks."""

    def __init__(self, case: Case, rank: int, record: Callable[..., None]) -> None:
        self.case, self.rank, self.record = case, rank, record
        self.step, self.micro = -1, 0
        mesh = make_mesh(case.mesh, case.device)
        timeout = case.timeout
        for dim in range(mesh.ndim):  # FSDP2 uses them; by default they wait for half an hour
            new_groups.set_timeout(timeout, mesh.get_group(dim))
        torch.manual_seed(0)
        self.session = Session(mesh, {**AHEAD, "lookahead": case.lookahead})
        units = {} if case.fsdp else {"units": None}
        model = (Listed() if case.listed else Ordered()).to(case.device)
        self.model = self.session.start(model, options={"timeout": timeout}, prepare=self.hook_inside, **units)
        if case.fault in SWAPS:
            # Equal models are told apart by nothing but their numbers; agreements of unequal ones have unequal lengths.
            second = Ordered(DEPTH + (case.fault == SWAPS[2]))
            self.second = self.session.another()
            self.second.start(second.to(case.device), options={"timeout": timeout}, **units)
        self.hook_outside()

    def at(self, point: str) -> None:
        """Strikes if it is time."""
        case = self.case
        here = (case.point, case.step, case.victim) == (point, self.step, self.rank)
        if not here or (point in IN_A_PASS and self.micro != case.micro):
            return
        self.record("strike")
        if case.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if case.fault == "raises":
            raise OwnFault(f"at '{point}'")
        time.sleep(NAP_S)

    def hook_inside(self, model: nn.Module) -> None:
        """dmuon's hooks go around these."""
        for index, block in enumerate(model.blocks):
            block.register_forward_pre_hook(self.enter(index, "computes", "backward ends"))
            block.register_forward_hook(self.leave(index, "computed", "backward begins"))

    def hook_outside(self) -> None:
        """These go around dmuon's, except that tensors' hooks run in the order in which they were added."""
        for index, block in enumerate(self.model.blocks):
            block.register_forward_pre_hook(self.enter(index, "enters", "gradient left"), prepend=True)
            block.register_forward_hook(self.leave(index, "leaves", ""))
            block.register_forward_hook(self.leave(index, "", "gradient comes"), prepend=True)
        adamw = self.session.opt._adamw
        step_of_adamw = adamw.step
        adamw.step = lambda *args: (self.at("AdamW begins"), step_of_adamw(*args))
        self.session.opt.register_step_pre_hook(lambda *_: self.at("step begins"))
        self.session.opt.register_step_post_hook(lambda *_: self.at("step ends"))

    def enter(self, index: int, moment: str, backward: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.at(f"block {index} {moment}")
            if args[0].requires_grad:
                args[0].register_hook(lambda _: self.at(f"block {index} {backward}"))

        return hook

    def leave(self, index: int, moment: str, backward: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.at(f"block {index} {moment}")
            if output.requires_grad:
                output.register_hook(lambda _: self.at(f"block {index} {backward}"))

        return hook

    def train(self) -> None:
        """One step."""
        case = self.case
        self.step += 1
        if case.fault in SWAPS:
            return self.train_both()
        if case.fault in ALONE:
            self.call_alone()
        mine = part(batch(self.step), self.rank, NUM_RANKS).to(case.device)
        for self.micro, tokens in enumerate(mine.chunk(case.micro_steps)):
            if (case.step, case.micro, case.victim) == (self.step, self.micro, self.rank):
                self.deviate()
            last = self.micro == case.micro_steps - 1
            with nullcontext() if last else dmuon.no_sync(self.model):
                self.at("forward begins")
                loss = loss_of(self.model, tokens)
                self.at("loss is there")
                loss.backward()
                self.at("backward is over")
                if case.device != "cpu" and case.fault != "sleeps":  # there the read takes as long as the nap
                    self.read(loss)
            self.model.order = list(range(DEPTH))
        if case.clips:
            self.session.clip(0.5)
            self.at("clipped")
        self.session.opt.step()
        self.record("step")
        self.session.opt.zero_grad()
        self.at("gradients cleared")

    def train_both(self) -> None:
        """One step of both models. From its step on, the victim does something with the second one first."""
        given = [self.session, self.second]
        is_struck = self.step >= self.case.step and self.rank == self.case.victim
        if is_struck and self.step == self.case.step:
            self.record("strike")
        mine = part(batch(self.step), self.rank, NUM_RANKS).to(self.case.device)
        trains, computes, steps = (given[::-1] if is_struck and self.case.fault == fault else given for fault in SWAPS)

        def compute(session: Session) -> None:
            loss_of(session.model, mine).backward()

        def step(session: Session) -> None:
            session.opt.step()
            session.opt.zero_grad()

        if self.case.fault == SWAPS[0]:
            for session in trains:
                compute(session)
                step(session)
        else:
            for session in computes:
                compute(session)
            for session in steps:
                step(session)
        self.record("step")

    def read(self, loss: torch.Tensor) -> None:
        """As programs do that log it: here the host waits, and dmuon does not know. An abort of NCCL's groups ends that
        with a value of no use, this device's with an error: what counts is that the next call of dmuon raises."""
        with suppress(RuntimeError):
            loss.item()

    def call_alone(self) -> None:
        """What only the victim does; an evaluation may have been traced by all ranks before."""
        is_struck = (self.case.step, self.case.victim) == (self.step, self.rank)
        if is_struck:
            self.record("strike")
        if self.case.fault == "full_params":
            if is_struck:
                with dmuon.full_params(self.model):
                    pass
        elif is_struck or (self.step == 1 and self.case.evaluated):
            with torch.no_grad():
                self.model(batch(self.step)[:, :-1].to(self.case.device))

    def deviate(self) -> None:
        if self.case.fault in DEVIATIONS:
            self.record("strike")
            self.model.order = DEVIATIONS[self.case.fault]


def stay(directory: Path) -> None:
    """As a process does whose program has ended, and that has other things to clean up: until the others have ended."""
    groups._leave()
    end = time.monotonic() + STAY_S
    while time.monotonic() < end:
        events = [path.read_text() for path in directory.glob("*.events")]
        if sum("gives up" in text for text in events) == NUM_RANKS:
            return
        time.sleep(0.1)


def play(rank: int, case: Case, directory: Path) -> None:
    """Trains until it raises; what happened is in the directory."""
    events = os.open(directory / f"{rank}.events", os.O_WRONLY | os.O_CREAT)

    def record(name: str, **facts: Any) -> None:
        os.write(events, json.dumps({"name": name, "time": time.monotonic(), **facts}).encode() + b"\n")

    store = dist.FileStore(str(directory / "store"), NUM_RANKS)
    timeout = case.timeout
    if case.silent:
        os.environ["ASYNC_DEVICE_PATIENT"] = "1"
    backends = "gloo" if case.device == "cpu" else use_emulated_device(rank)
    if case.device != "cpu":
        import async_device

        atexit.unregister(async_device.reset)  # a process that ends does not wait for its GPU
    dist.init_process_group(backends, store=store, rank=rank, world_size=NUM_RANKS, timeout=timeout)

    def train(program: Program, steps: int) -> None:
        try:
            for _ in range(steps):
                program.train()
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            record("raised", kinds=kinds, message=str(error))
            raise

    program = Program(case, rank, record)
    others = rank != case.victim
    try:
        with suppress(Exception) if case.insists and others else nullcontext():
            train(program, case.step + 1 + STEPS_AFTER)
        train(program, 1)
        record("trained on")
    except Exception as error:
        if case.lingers and others:
            time.sleep(NAP_S)
        record("gives up")
        if case.stays and not others:
            stay(directory)
        if not case.drops:
            raise
        traceback.clear_frames(error.__traceback__)
    model = weakref.ref(program.model)
    del program
    gc.collect()
    record("dropped", freed=model() is None)
    sys.exit(1)
