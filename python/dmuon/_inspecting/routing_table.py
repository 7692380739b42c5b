"""The routing table of a model, with owners and units once Muon has planned."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn as nn

from dmuon._running.runtime import find_runtime
from dmuon._setup.dedication import dedication_of
from dmuon._setup.routing_table import RoutingTable


def routing_table(model: nn.Module) -> RoutingTable:
    """Returns, for every parameter, the algorithm that updates it and why; after Muon also owner's slot and unit.

    Raises:
        ValueError: dedicate_params was not called on the model.
    """
    table, runtime = dedication_of(model, "routing_table").table, find_runtime(model, "routing_table")
    if runtime is None:
        return table
    unit_of = {leaf: unit.name for unit in runtime.units for leaf in unit.leaves}
    found: dict[str, Any] = {
        leaf.name: {"owner": runtime.owners_of(index), "unit": unit_of[index]}
        for index, leaf in enumerate(runtime.leaves)
    }
    return RoutingTable((dataclasses.replace(row, **found.get(row.name, {})) for row in table), table.note)
