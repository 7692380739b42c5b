"""The model and the task that the arguments of `plan`, `compare` and `simulate` mean, with their files read."""

from __future__ import annotations

import argparse
import functools

from dmuon import _plan
from dmuon._planning.owner_plan import MOST_OWNERS, from_file
from dmuon._planning.task import Task, plan_options, task_of


def read_task(arguments: argparse.Namespace, model: _plan.Model) -> Task:
    """Returns the task of planning `model`.

    Raises:
        ValueError: the file of --costs cannot be read, or arguments exclude each other.
    """
    mesh = _mesh_of(arguments.mesh, arguments.tp)
    if arguments.tp > 1 and arguments.rule != (rule := _plan.rule_names()[0]):
        raise ValueError(f"--rule: expected {rule} with --tp, which cuts matrices; got {arguments.rule}")
    return task_of(model.inventory, mesh, arguments.device, arguments.costs, "--costs", _options(arguments))


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


def _mesh_of(shape: tuple[int, int], tensor_parallel: int) -> _plan.Mesh:
    """Returns the mesh, whose slots are groups of `tensor_parallel` GPUs that share matrices."""
    nodes, gpus = shape
    if gpus % tensor_parallel:
        raise ValueError(
            f"--tp: expected a divisor of the {gpus} GPUs of a node, got {tensor_parallel}: --mesh counts nodes x GPUs "
            f"a node, and every matrix is sharded over --tp of a node's GPUs; did you mean {gpus} groups of "
            f"{tensor_parallel} GPUs a node, which is --mesh {nodes}x{gpus * tensor_parallel}?"
        )
    if (owners := nodes * gpus) > MOST_OWNERS:
        raise ValueError(
            f"--mesh: expected at most {MOST_OWNERS} owners (nodes x GPUs a node), as planning for more takes minutes; "
            f"got {owners}"
        )
    return _plan.Mesh(nodes, gpus // tensor_parallel, tensor_parallel)


def _options(arguments: argparse.Namespace) -> _plan.PlanOptions:
    return plan_options(
        arguments.command,
        on_cpu=arguments.device == "cpu",
        num_nodes=arguments.mesh[0],
        rule=arguments.rule,
        lookahead=arguments.lookahead,
        node_copy=not arguments.no_node_copy,
        replicated=arguments.replicated,
        late_updates=False if getattr(arguments, "in_step", False) else None,
        layout_slack=arguments.layout_slack,
        max_memory_bytes=arguments.max_memory or None,
    )
