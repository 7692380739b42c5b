"""The routing table of a model, with owners and units once Muon has planned."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn as nn

from dmuon._running.runtime import Runtime, find_runtime
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
        leaf.name: {"owner": _owners_of(runtime, index), "unit": unit_of[index]}
        for index, leaf in enumerate(runtime.leaves)
    }
    return RoutingTable((dataclasses.replace(row, **found.get(row.name, {})) for row in table), table.note)


def _owners_of(runtime: Runtime, leaf: int) -> int | tuple[int, ...]:
    """Returns the owner of a leaf, or the owners of parts of it, in the parts' order."""
    owners = tuple(dict.fromkeys(runtime.plan.owner[part] for part in runtime.parts[leaf]))
    return owners[0] if len(owners) == 1 else owners
