"""One rank dies in the middle of a step; the others must say so within the timeout."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from models import make_gpt
from scenario import Session

TIMEOUT_S = 8
VICTIM = 1


def _die(*_: Any) -> None:
    os._exit(17)


def rank_that_dies(mesh: Any, when: str, fsdp: bool) -> tuple[str, str, float]:
    """(type, message, seconds) of what this rank raises after another has died in the second step."""
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    # The mesh's own groups, which FSDP2 uses, wait half an hour by default.
    for dim in range(mesh.ndim):
        dist.distributed_c10d._set_pg_timeout(timeout, mesh.get_group(dim))
    s = Session(mesh)
    model = s.start(make_gpt(depth=2), dedicate={"timeout": timeout}, **({} if fsdp else {"units": None}))
    s.train(0, 1)
    if s.rank == VICTIM:
        _arm(model, s, when)
    began = time.monotonic()
    try:
        s.train(2, 3)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("the loss of a rank went unnoticed")


def _plant(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(_die)


def _arm(model: nn.Module, s: Session, when: str) -> None:
    if when == "forward":
        model.blocks[1].register_forward_pre_hook(_die)
    elif when == "backward":
        model.blocks[0].register_forward_hook(_plant)
    elif when == "step":
        s.opt.register_step_pre_hook(_die)
    else:
        raise ValueError(when)


def rank_that_hangs(mesh: Any) -> tuple[str, str, float]:
    """As above, where the rank lives and does not come."""
    s = Session(mesh)
    s.start(make_gpt(depth=2), dedicate={"timeout": datetime.timedelta(seconds=TIMEOUT_S)}, units=None)
    s.train(0)
    began = time.monotonic()
    if s.rank == VICTIM:
        time.sleep(TIMEOUT_S + 5)
        return "asleep", "", 0.0
    try:
        s.train(1, 2)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("the loss of a rank went unnoticed")
