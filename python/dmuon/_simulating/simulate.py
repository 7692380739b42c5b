"""`dmuon.simulate`: the predicted step of a model in Python."""

from __future__ import annotations

import json
import math
import os

import torch.nn as nn

from dmuon import _plan
from dmuon._planning.basis import PythonBasis
from dmuon._planning.inventory import inventory
from dmuon._planning.owner_plan import DEFAULT_DEVICE
from dmuon._setup.hyperparameters import RULE
from dmuon._setup.option_values import real_number, require
from dmuon._setup.options import STEP, Planning
from dmuon._setup.routing import Select
from dmuon._simulating.simulation import DEFAULT_TOKENS, MOST_DEVICES, MOST_TOKENS, Simulation, cluster_of


def simulate(
    model: nn.Module | str,
    mesh: tuple[int, int],
    *,
    device: str = DEFAULT_DEVICE,
    network: str | None = None,
    inter_bandwidth: float | None = None,
    tokens: int | None = None,
    strategy: str = Planning.strategy,
    costs: str | os.PathLike[str] | None = None,
    select: Select | None = None,
    rule: str = RULE,
    tensor_parallel: int = 1,
    lookahead: int = STEP.lookahead,
    node_copy: bool = STEP.node_copy,
    replicated: bool = STEP.replicated,
    late_updates: bool | None = None,
    layout_slack: float = Planning.layout_slack,
    max_memory_bytes: int | None = Planning.max_memory_bytes,
) -> Simulation:
    """Predicts a training step under AdamW, dmuon and Muon-AG, on devices that need not be there.

    The schedule is the engine's own; durations come from rates of the device and of the network. `docs/simulate.md`
    says what is modelled and how far to trust it.

    Args:
        model: a module before `dedicate_params` and `fully_shard`, on any device ("meta" will do). Or the name of a
            model, as `dmuon models` lists them. Predictions count the FLOPs of a module's
            matrices, not those of attention.
        mesh: (nodes, devices a node).
        device: a device's name, as `dmuon models` lists them.
        network: a network's name. None means the device's usual one.
        inter_bandwidth: bytes a second of a node's network in each direction. None means the network's.
        tokens: of each device and step. None means a sequence of a named model, or 4096.
        strategy: as for `dedicate_params`.
        costs: the path of a table of measured costs of updates, instead of the device's model.
        select: as for `dedicate_params`. For a module alone.
        rule: as for `Muon`. Memory depends on it, predicted times do not.
        tensor_parallel: number of a node's devices over which every matrix is sharded.
        lookahead: as for `dedicate_params`.
        node_copy: as for `dedicate_params`.
        replicated: as for `dedicate_params`. AdamW and Muon-AG then run under DistributedDataParallel.
        late_updates: as for `dedicate_params`.
        layout_slack: as for `dedicate_params`.
        max_memory_bytes: as for `dedicate_params`.

    Raises:
        ValueError: the module is dedicated or sharded already, or an argument is bad.
    """
    basis = PythonBasis(
        function="simulate",
        device=device,
        strategy=strategy,
        costs=costs,
        rule=rule,
        tensor_parallel=tensor_parallel,
        lookahead=lookahead,
        node_copy=node_copy,
        replicated=replicated,
        late_updates=late_updates,
        layout_slack=layout_slack,
        max_memory_bytes=max_memory_bytes,
    )
    on = basis.mesh_of(mesh, MOST_DEVICES)
    good = tokens is None or (type(tokens) is int and 0 < tokens <= MOST_TOKENS)
    require("simulate", good, "tokens", f"None or a whole number from 1 to {MOST_TOKENS}", tokens)
    bandwidth = real_number(inter_bandwidth)
    good = inter_bandwidth is None or (bandwidth is not None and 0 < bandwidth < math.inf)
    require("simulate", good, "inter_bandwidth", "None or bytes a second, more than 0", inter_bandwidth)
    networks = _plan.network_names()
    require("simulate", network is None or network in networks, "network", f"None or one of {networks}", network)
    described = _described(model, select, tensor_parallel > 1)
    plan = basis.plan(on, described.inventory)
    cluster = cluster_of(device, network, bandwidth, mesh[1], tokens or described.sequence or DEFAULT_TOKENS)
    return Simulation(f"{described.name} on {mesh[0]}x{mesh[1]}", described, plan, cluster)


def _described(model: nn.Module | str, select: Select | None, sharded: bool) -> _plan.Model:
    if isinstance(model, str):
        if select is not None:
            raise ValueError(f"simulate: select: expected none for a model that is named, got {select!r}")
        known = _plan.model_names()
        require("simulate", model in known, "model", f"one of {known}", model)
        return _plan.model(model, sharded)
    if not isinstance(model, nn.Module):
        raise ValueError(f"simulate: model: expected a module, or a name of `dmuon models`; got {model!r}")
    return _plan.model_from_json(json.dumps(inventory(model, select)), sharded)
