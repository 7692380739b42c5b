"""Pictures by matplotlib, and the picture of a plan."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

from dmuon import _plan
from dmuon._planning.table import gap_text, mesh_text, parameters_text

_MOST_LAYERS = 10  # colours that look different


def new_figure(function: str, **options: Any) -> Any:
    """Returns an empty figure of matplotlib, which needs no display.

    Raises:
        ImportError: matplotlib is missing. Names `function`.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            f"{function}: expected matplotlib, which is not installed: pip install 'dmuon[examples]'"
        ) from error
    return figures.Figure(layout="constrained", **options)


def require_format(path: str | os.PathLike[str], function: str) -> None:
    """Raises a ValueError that names `function`, unless matplotlib writes the format of the path's ending."""
    known = sorted(new_figure(function).canvas.get_supported_filetypes())
    if Path(path).suffix.lower().removeprefix(".") not in known:
        endings = ", ".join(f".{ending}" for ending in known)
        raise ValueError(f"{function}: expected a file that ends in one of {endings}; got {str(path)!r}")


def save(plan: _plan.Plan, path: str | os.PathLike[str], title: str, function: str) -> None:
    """Writes the picture of a plan; see `Plan.save_picture`."""
    require_format(path, function)
    draw(plan, title, function).savefig(path)


def draw(plan: _plan.Plan, title: str, function: str) -> Any:
    """Draws a plan: owners with their predicted times and the bound, and units with the columns of their weights."""
    figure = new_figure(function, figsize=(13, 8.5), dpi=120)
    figure.suptitle("\n".join([title, _summary(plan)] if title else [_summary(plan)]), fontsize=11, parse_math=False)
    times, weights = figure.subplots(2, 1, height_ratios=[3, 2])
    _draw_times(times, plan)
    _draw_columns(figure, weights, plan)
    return figure


def _summary(plan: _plan.Plan) -> str:
    return (
        f"{plan.strategy} on a mesh of {mesh_text(plan.mesh)}: {parameters_text(plan.inventory)} in "
        f"{len(plan.batches)} batches, makespan {plan.makespan_ns / 1e6:.3f} ms, bound {plan.bound_ns / 1e6:.3f} ms"
        f"{gap_text(plan)}\n"
        f"costs: {plan.costs.source}"
    )


def times_by_shape(plan: _plan.Plan) -> dict[str, list[float]]:
    """Returns every owner's milliseconds for each shape, the longest first.

    Keys are like "3584 x 3584 (56)", with the number of parameters. The last of many shapes share one entry.
    """
    inventory, costs = plan.inventory, plan.costs
    times = {one.shape_text(): dict(costs.batches(one)) for one in inventory}  # nanoseconds by size of batch
    loads = {shape: [0.0] * plan.mesh.num_owners() for shape in times}
    numbers = Counter[str]()
    for owner, parameters in plan.batches:
        shape = inventory[parameters[0]].shape_text()
        loads[shape][owner] += times[shape][len(parameters)] / 1e6
        numbers[shape] += len(parameters)
    order = sorted(loads, key=lambda shape: -sum(loads[shape]))
    alone = order if len(order) <= _MOST_LAYERS else order[: _MOST_LAYERS - 1]
    layers = {f"{shape} ({numbers[shape]})": loads[shape] for shape in alone}
    if others := order[len(alone) :]:
        name = f"{len(others)} other shapes ({sum(numbers[shape] for shape in others)})"
        layers[name] = [sum(column) for column in zip(*(loads[shape] for shape in others), strict=True)]
    return layers


def _draw_times(axes: Any, plan: _plan.Plan) -> None:
    num_owners = plan.mesh.num_owners()
    edges = [owner - 0.5 for owner in range(num_owners + 1)]
    below = [0.0] * num_owners
    for place, (name, loads) in enumerate(times_by_shape(plan).items()):
        above = [one + other for one, other in zip(below, loads, strict=True)]
        # One artist for all owners: there may be thousands.
        axes.stairs(above, edges, baseline=below, fill=True, label=name, color=f"C{place}")
        below = above
    if num_owners <= 64:
        axes.vlines(edges, 0, 1, transform=axes.get_xaxis_transform(), color="white", linewidth=1)
    axes.axhline(plan.bound_ns / 1e6, color="black", linestyle="--", linewidth=1.2, label="bound")
    axes.set(xlim=(edges[0], edges[-1]), xlabel="owner", ylabel="predicted ms")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title("Predicted time of every owner, by shape (parameters)", loc="left", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False)


def weights_by_column(plan: _plan.Plan) -> list[list[float]]:
    """Returns megabytes of weights in the compute dtype, [columns][units in execution order]."""
    inventory, owners = plan.inventory, plan.owner
    place = {unit: index for index, unit in enumerate(dict.fromkeys(one.unit for one in inventory))}
    weights = [[0.0] * len(place) for _ in range(plan.mesh.num_shards)]
    for one, owner in zip(inventory, owners, strict=True):
        megabytes = one.num_matrices * one.rows * one.cols * plan.options.weight_bytes / 1e6
        weights[plan.mesh.shard_of(owner)][place[one.unit]] += megabytes
    return weights


def _draw_columns(figure: Any, axes: Any, plan: _plan.Plan) -> None:
    axes.set_title("Weights of every unit, by the column that they travel in", loc="left", fontsize=10)
    axes.set(xlabel="unit, in execution order", ylabel="column")
    weights = weights_by_column(plan)
    if not weights[0]:
        return
    image = axes.imshow(weights, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0)
    figure.colorbar(image, cax=axes.inset_axes((1.01, 0, 0.015, 1)), label="MB")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
