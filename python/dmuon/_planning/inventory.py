"""Lists the matrices of a model: for `dmuon plan --inventory`, and as parameters of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch.nn as nn

from dmuon import _plan
from dmuon._setup.leaf import Leaf
from dmuon._setup.routing import Select, route
from dmuon._setup.tensor_parallel import note_slices_alone
from dmuon._setup.units import Unit, find_units
from dmuon._setup.wrappers import plain_module
from dmuon.views import View


def inventory(model: nn.Module, select: Select | None = None) -> dict[str, Any]:
    """Returns the matrices that Muon would update in a model. Write them with json.dump for `dmuon plan --inventory`.

    Args:
        model: any model before `dedicate_params` and `fully_shard`, on any device ("meta" will do). If tensor
            parallelism has cut it already, the matrices that it leaves whole are marked for `--tp`.
        select: as for `dedicate_params`.

    Raises:
        ValueError: the model is dedicated or sharded already.
    """
    model = plain_module(model, "inventory")
    leaves, units = routed(model, "inventory", select)
    is_parallel = note_slices_alone(model, leaves, "inventory")
    items = inventory_of(leaves, units)
    name = type(model).__name__
    return {
        "schema_version": 1,
        "name": name,
        "description": f"The matrices that dmuon takes of a {name}.",
        "source": "dmuon.inventory",
        "stand_in": False,
        "training": _outside_of(model, leaves),
        # In module order: a unit whose leaves lie between others' has several entries.
        "units": [
            _entry(units[unit].name, unit, list(run), is_parallel)
            for unit, run in groupby(items, key=lambda item: item.unit)
        ],
    }


def _outside_of(model: nn.Module, leaves: list[Leaf]) -> dict[str, int]:
    """Returns what predictions of a step need about parameters that Muon does not take.

    AdamW updates those that train. Frozen weights are multiplied too.
    """
    taken = {id(leaf.parameter) for leaf in leaves}
    others = [parameter for parameter in model.parameters() if id(parameter) not in taken]
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return {
        "outside_elements": sum(parameter.numel() for parameter in others if parameter.requires_grad),
        "outside_flops": sum(2 * parameter.numel() for parameter in others if id(parameter) in linear),
    }


def _entry(unit: str, index: int, items: list[_plan.Parameter], is_parallel: bool) -> dict[str, Any]:
    """Returns an entry of an inventory. The entry has no name if a tied leaf lies outside its unit.

    `is_parallel`: the model is under tensor parallelism.
    """
    prefix = f"{unit}."
    if not unit or not all(item.name.startswith(prefix) for item in items):
        unit, prefix = "", ""
    listed = [
        {"name": item.name.removeprefix(prefix), "rows": item.rows, "cols": item.cols}
        | ({"num_matrices": item.num_matrices} if item.num_matrices > 1 else {})
        | ({"column_blocks": item.column_blocks} if item.column_blocks > 1 else {})
        | ({"transposed": True} if item.transposed else {})
        | ({"heights": item.heights} if item.heights else {})
        | ({"continues": True} if item.continues else {})
        | ({"column": item.column} if item.column is not None else {})
        | ({"whole": True} if is_parallel and not item.tensor_parallel else {})
        for item in items
    ]
    return {"name": unit, "unit": index, "matrices": listed}


def routed(model: nn.Module, function: str, select: Select | None) -> tuple[list[Leaf], list[Unit]]:
    """Returns the leaves that Muon would update, and their units. `function` is named in errors."""
    leaves, _ = route(model, select, function)
    return leaves, find_units(model, [[place.path for place in leaf.places] for leaf in leaves])


def inventory_of(leaves: list[Leaf], units: list[Unit], sharded: bool = False) -> list[_plan.Parameter]:
    """Returns the leaves as parameters of a plan. `sharded`: tensor parallelism will cut all of them.

    A leaf of several views, or one that is divided by experts, becomes several parts: "name[0:1]" and so on.
    """
    unit_of = {leaf: index for index, unit in enumerate(units) for leaf in unit.leaves}
    items = []
    for index, leaf in enumerate(leaves):
        end = 0
        for number, view in enumerate(_parts_of(leaf)):
            begin, end = end, end + view.count
            name = f"{leaf.name}[{begin}:{end}]" if len(leaf.views) > 1 or leaf.num_columns > 1 else leaf.name
            items.append(
                _plan.Parameter(
                    name,
                    view.rows,
                    view.cols,
                    unit_of[index],
                    num_matrices=view.count,
                    continues=begin > 0,
                    column=number if leaf.num_columns > 1 else None,
                    column_blocks=view.column_blocks,
                    transposed=view.transposed,
                    heights=list(view.heights),
                    tensor_parallel=sharded or leaf.cut is not None,
                )
            )
    return items


def _parts_of(leaf: Leaf) -> Sequence[View]:
    """Returns the leaf's views, or each column's part of a stack that is divided by experts."""
    if leaf.num_columns == 1:
        return leaf.views
    view = leaf.views[0]
    return [dataclasses.replace(view, count=view.count // leaf.num_columns)] * leaf.num_columns
