"""`dmuon.simulate`: the predicted step of a model in Python."""

from __future__ import annotations

import json
import os

import torch.nn as nn

from dmuon import _plan
from dmuon._planning.inventory import inventory
from dmuon._planning.owner_plan import DEFAULT_DEVICE
from dmuon._planning.plan import plan_on, require_basis
from dmuon._setup.hyperparameters import RULE
from dmuon._setup.options import Planning
from dmuon._setup.routing import Select
from dmuon._simulating.simulation import DEFAULT_TOKENS, MOST_DEVICES, MOST_TOKENS, Cluster, Simulation


def simulate(
    model: nn.Module | str,
    mesh: tuple[int, int],
    *,
    device: str = DEFAULT_DEVICE,
    network: str | None = None,
    tokens: int | None = None,
    strategy: str = Planning.strategy,
    costs: str | os.PathLike[str] | None = None,
    select: Select | None = None,
    late_updates: bool | None = None,
    rule: str = RULE,
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
        tokens: of each device and step. None means a sequence of a named model, or 4096.
        strategy: as for `dedicate_params`.
        costs: the path of a table of measured costs of updates, instead of the device's model.
        select: as for `dedicate_params`. For a module alone.
        late_updates: as for `dedicate_params`.
        rule: as for `Muon`. Memory depends on it, predicted times do not.

    Raises:
        ValueError: the module is dedicated or sharded already, or an argument is bad.
    """
    if not isinstance(mesh, tuple | list) or len(mesh) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in mesh):
        raise ValueError(f"simulate: mesh: expected (nodes, devices a node), got {mesh!r}")
    if mesh[0] * mesh[1] > MOST_DEVICES:
        raise ValueError(f"simulate: mesh: expected at most {MOST_DEVICES} devices, got {mesh}")
    if tokens is not None and (type(tokens) is not int or not 0 < tokens <= MOST_TOKENS):
        raise ValueError(f"simulate: tokens: expected a whole number from 1 to {MOST_TOKENS}, got {tokens!r}")
    if late_updates is not None and not isinstance(late_updates, bool):
        raise ValueError(f"simulate: late_updates: expected None, True or False, got {late_updates!r}")
    require_basis("simulate", device, strategy, costs)
    if network is not None:
        _require_known("network", network, _plan.network_names())
    described = _described(model, select)
    plan = plan_on(mesh, described.inventory, "simulate", device, strategy, costs, late_updates, rule)
    rates = _plan.device(device)
    cluster = Cluster(rates, _plan.network(network or rates.network), tokens or described.sequence or DEFAULT_TOKENS)
    return Simulation(f"{described.name} on {mesh[0]}x{mesh[1]}", described, plan, cluster)


def _require_known(argument: str, name: object, known: list[str]) -> None:
    if name not in known:
        raise ValueError(f"simulate: {argument}: expected one of {known}, got {name!r}")


def _described(model: nn.Module | str, select: Select | None) -> _plan.Model:
    if isinstance(model, str):
        if select is not None:
            raise ValueError(f"simulate: select: expected none for a model that is named, got {select!r}")
        _require_known("model", model, _plan.model_names())
        return _plan.model(model)
    if not isinstance(model, nn.Module):
        raise ValueError(f"simulate: model: expected a module, or a name of `dmuon models`; got {model!r}")
    return _plan.model_from_json(json.dumps(inventory(model, select)))
