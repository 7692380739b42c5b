"""Models with a plan, on the ranks of a pool; what the tests of plans share."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn as nn
from models import make_gpt
from training import AHEAD, dedicate, place_of, shard

import dmuon
from dmuon import _plan


def started(mesh: Any, depth: int = 3, **options: Any) -> tuple[nn.Module, dmuon.Muon]:
    model = make_gpt(depth=depth)
    dedicate(model, mesh, AHEAD, **options)
    shard(model, mesh)
    return model, dmuon.Muon(model, ns_dtype=torch.float32)


def plan_json(mesh: Any, **options: Any) -> str:
    _, opt = started(mesh, **options)
    return opt.plan.to_json()


def error(mesh: Any, **options: Any) -> str:
    try:
        started(mesh, **options)
    except ValueError as raised:
        return str(raised)
    return ""


def saved(mesh: Any, path: str, **options: Any) -> list[int]:
    model, opt = started(mesh, **options)
    if place_of(mesh)[0] == 0:
        dmuon.plan(model).save(path)
    torch.distributed.barrier()
    return opt.plan.owner


def every_matrix_of(item: _plan.Parameter) -> list[_plan.Parameter]:
    """What has one owner of a plan, as parts of one matrix each."""
    name, first = item.name, 0
    if found := re.fullmatch(r"(.*)\[(\d+):\d+\]", item.name):
        name, first = found[1], int(found[2])
    elif item.num_matrices == 1:
        return [item]
    return [
        _plan.Parameter(
            f"{name}[{at}:{at + 1}]",
            item.rows,
            item.cols,
            item.unit,
            continues=at > 0,
            column=item.column,
            column_blocks=item.column_blocks,
            transposed=item.transposed,
        )
        for at in range(first, first + item.num_matrices)
    ]
