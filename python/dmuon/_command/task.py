"""The task of a plan: the options that `plan` and `compare` share, with their files read."""

from __future__ import annotations

import argparse
import dataclasses
import functools

from dmuon import _plan
from dmuon._planning.owner_plan import DEFAULT_DEVICE, MOST_OWNERS, decide, from_file, reserve_bytes


@dataclasses.dataclass(frozen=True)
class Task:
    """A model on a mesh, with costs and options."""

    title: str
    inventory: list[_plan.Parameter]
    mesh: _plan.Mesh
    costs: _plan.CostTable
    options: _plan.PlanOptions

    def plan(self, strategy: str) -> _plan.Plan:
        """Makes a plan by a strategy."""
        return decide(self.inventory, self.mesh, strategy, self.costs, self.options)


def read_task(arguments: argparse.Namespace) -> Task:
    """Reads the files that the arguments name.

    Raises:
        ValueError: a file cannot be read, or arguments exclude each other.
    """
    if (arguments.model is None) == (arguments.inventory is None):
        raise ValueError("expected --model or --inventory, one of them")
    # A prediction of a step asks a device for more than costs.
    if arguments.device is not None and arguments.costs is not None and arguments.command != "simulate":
        raise ValueError("expected --device or --costs, got both")
    model = read_model(arguments, arguments.tp > 1)
    nodes, gpus = arguments.mesh
    mesh = _mesh_of(nodes, gpus, arguments.tp)
    inventory = _plan.divide(model.inventory, mesh)
    if arguments.costs is None:
        costs = _plan.modelled_costs(inventory, arguments.device or DEFAULT_DEVICE, mesh.tensor_parallel)
    else:
        costs = from_file(arguments.costs, _plan.CostTable.from_json, "--costs: cannot read")
        costs = _plan.with_exchange(costs, arguments.device or DEFAULT_DEVICE, mesh.tensor_parallel)
    title = f"{model.name}{' (stand-in)' if model.stand_in else ''} on {nodes}x{gpus}"
    return Task(title, inventory, mesh, costs, _options(arguments))


def read_model(arguments: argparse.Namespace, tensor_parallel: bool = False) -> _plan.Model:
    """Returns the model that --model names, or that the file of --inventory describes.

    `tensor_parallel`: its matrices are cut, except those that the file calls whole.

    Raises:
        ValueError: the file cannot be read.
    """
    if arguments.model is not None:
        return _plan.model(arguments.model, tensor_parallel)
    read = functools.partial(_plan.model_from_json, tensor_parallel=tensor_parallel)
    return from_file(arguments.inventory, read, "--inventory: cannot read")


def _mesh_of(nodes: int, gpus: int, tensor_parallel: int) -> _plan.Mesh:
    """Returns the mesh, whose slots are groups of `tensor_parallel` GPUs that share matrices."""
    if gpus % tensor_parallel:
        raise ValueError(
            f"--tp: expected a divisor of the {gpus} GPUs of a node, got {tensor_parallel}: --mesh counts nodes x GPUs "
            f"a node, and every matrix is sharded over --tp of a node's GPUs; did you mean {gpus} groups of "
            f"{tensor_parallel} GPUs a node, which is --mesh {nodes}x{gpus * tensor_parallel}?"
        )
    if (owners := nodes * gpus // tensor_parallel) > MOST_OWNERS:
        raise ValueError(
            f"--mesh: expected at most {MOST_OWNERS} owners (nodes x GPUs a node, by --tp), as planning for more takes "
            f"minutes; got {owners}"
        )
    return _plan.Mesh(nodes, gpus // tensor_parallel, tensor_parallel)


def _options(arguments: argparse.Namespace) -> _plan.PlanOptions:
    options = _plan.PlanOptions()
    options.lookahead = arguments.lookahead
    options.layout_slack = arguments.layout_slack
    options.max_memory_bytes = arguments.max_memory
    options.node_copy = not arguments.no_node_copy and not arguments.replicated
    options.reshard_after_forward = not arguments.replicated
    options.replicated = arguments.replicated
    options.on_cpu = arguments.device == "cpu"
    options.rule = arguments.rule
    options.late_updates = _plan.updates_late(options.on_cpu, arguments.mesh[0])
    options.reserve_bytes = reserve_bytes(options.on_cpu)
    return options
