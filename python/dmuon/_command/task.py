"""The model and the task that the arguments of `plan`, `compare` and `simulate` mean, with their files read."""

from __future__ import annotations

import argparse
import functools

from dmuon import _plan
from dmuon._planning.owner_plan import DEFAULT_DEVICE, MOST_OWNERS, from_file
from dmuon._planning.task import Basis, Task, mesh_of

_OPTIONS = {"mesh": "--mesh", "tensor_parallel": "--tp", "rule": "--rule"}


def read_task(arguments: argparse.Namespace, model: _plan.Model) -> Task:
    """Returns the task of planning `model`.

    Raises:
        ValueError: the file of --costs cannot be read, or arguments exclude each other.
    """
    mesh = mesh_of(arguments.mesh, arguments.tp, arguments.rule, MOST_OWNERS, _OPTIONS.__getitem__)
    basis = Basis(
        function=arguments.command,
        device=arguments.device or DEFAULT_DEVICE,
        strategy="",  # of each plan
        costs=arguments.costs,
        rule=arguments.rule,
        tensor_parallel=arguments.tp,
        lookahead=arguments.lookahead,
        node_copy=not arguments.no_node_copy,
        replicated=arguments.replicated,
        late_updates=False if getattr(arguments, "in_step", False) else None,
        layout_slack=arguments.layout_slack,
        max_memory_bytes=arguments.max_memory or None,
    )
    return basis.task(mesh, model.inventory, "--costs", basis.rule)


def title_of(model: _plan.Model, mesh: tuple[int, int]) -> str:
    """Returns what is planned or predicted, as answers begin."""
    return f"{model.name}{' (stand-in)' if model.stand_in else ''} on {mesh[0]}x{mesh[1]}"


def read_model(arguments: argparse.Namespace) -> _plan.Model:
    """Returns the model that --model names, or that the file of --inventory describes.

    With --tp its matrices are cut, except those that the file calls whole.

    Raises:
        ValueError: both or none are given, or the file cannot be read.
    """
    if (arguments.model is None) == (arguments.inventory is None):
        raise ValueError("expected --model or --inventory, one of them")
    tensor_parallel = getattr(arguments, "tp", 1) > 1
    if arguments.model is not None:
        return _plan.model(arguments.model, tensor_parallel)
    read = functools.partial(_plan.model_from_json, tensor_parallel=tensor_parallel)
    return from_file(arguments.inventory, read, "--inventory: cannot read")
