"""The answers of `plan`, `compare` and `models`, as text."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dmuon import _plan
from dmuon._command.task import read_model, read_task, title_of
from dmuon._planning import pictures
from dmuon._planning.owner_plan import from_file
from dmuon._planning.table import mesh_text, parameters_text, table
from dmuon._planning.task import Task
from dmuon._setup.strategies import MILP, strategies

_MOST_ROWS = 16  # owners
_MOST_MOVES = 10  # parameters that moved


def plan(arguments: argparse.Namespace) -> str:
    """Returns one plan, as a table or as JSON. Saves and draws it if the arguments ask for that."""
    picture, file = arguments.plot, arguments.save
    if picture is not None:
        if file is not None and os.path.realpath(file) == os.path.realpath(picture):
            raise ValueError(f"--save, --plot: expected two files, got {picture!r} for both")
        pictures.require_format(picture, "--plot")
    model = read_model(arguments)
    title = title_of(model, arguments.mesh)
    made = read_task(arguments, model).plan(arguments.strategy)
    text = f"{made.to_json()}\n" if arguments.json or file is not None else ""
    if file is not None:
        write_file(file, lambda: Path(file).write_text(text, encoding="utf-8"))
    bandwidth = arguments.inter_bandwidth
    if arguments.json and bandwidth is not None:
        wire = made.wire_time(bandwidth)
        times = {"publish_ms": wire.publish_ms, "route_ms": wire.route_ms, "bound_ms": wire.bound_ms}
        text = _as_line(json.loads(text) | {"wire": times | {"bytes_per_s": bandwidth}})
    if picture is not None:
        write_file(picture, lambda: pictures.save(made, picture, title, "--plot"))
    return text if arguments.json else f"{title}\n{table(made, _MOST_ROWS, bandwidth)}"


def _as_line(value: dict[str, Any]) -> str:
    """Returns compact JSON with sorted keys, as plans have it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"


def write_file(path: str, write: Callable[[], object]) -> None:
    """Calls `write`, which writes the file. A failure names the path."""
    try:
        write()
    except OSError as error:
        raise ValueError(f"cannot write {path!r}: {error.strerror}") from error


def compare(arguments: argparse.Namespace) -> str:
    """Returns strategies on one task, side by side: the named ones, or all except the slow milp."""
    model = read_model(arguments)
    task = read_task(arguments, model)
    chosen = arguments.strategy or [name for name in strategies() if name != MILP]
    rows = [_row(task, strategy) for strategy in dict.fromkeys(chosen)]
    if all("error" in row for row in rows):
        raise ValueError(rows[0]["error"])
    if arguments.json:
        return json.dumps(rows) + "\n"
    lines = [
        f"{title_of(model, arguments.mesh)}, costs: {task.costs.source}",
        "strategy      makespan ms    bound ms     gap %  memory GiB  columns  busiest  seconds",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['strategy']:<13} {row['error']}")
            continue
        lines.append(
            f"{row['strategy']:<13}{row['makespan_ms']:12.3f}{row['bound_ms']:12.3f}{row['gap'] * 100:10.2f}"
            f"{row['memory_gib']:12.2f}{row['distinct_columns']:9.2f}{row['busiest_column']:9.2f}{row['seconds']:9.3f}"
        )
    lines.append(
        "memory: of the fullest rank; columns: that a window of units touches; busiest: its fullest column's bytes "
        "over the mean"
    )
    return "\n".join(lines) + "\n"


def _row(task: Task, strategy: str) -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        made = task.plan(strategy)
    except ValueError as error:  # too little memory, or no SciPy
        return {"strategy": strategy, "error": str(error)}
    if made.strategy != strategy:
        return {"strategy": strategy, "error": f"found no plan of its own; {made.strategy} decided"}
    return {
        "strategy": strategy,
        "makespan_ms": made.makespan_ns / 1e6,
        "bound_ms": made.bound_ns / 1e6,
        "gap": made.gap,
        "memory_gib": max(made.memory_bytes) / 2**30,
        "distinct_columns": made.spread.distinct_columns,
        "busiest_column": made.spread.busiest_column,
        "seconds": time.perf_counter() - begin,
    }


def compare_plans(files: Sequence[str]) -> str:
    """Returns the figures of two saved plans of the same parameters. Lists what moved if both are for one mesh."""
    plans = [from_file(file, _plan.Plan.from_json, "plan: cannot read") for file in files]
    first, second = plans
    second.require_fit(first.inventory, second.mesh)
    lines = [" makespan ms    bound ms    gap %  columns  mesh, strategy, file"]
    for file, one in zip(files, plans, strict=True):
        lines.append(
            f"{one.makespan_ns / 1e6:12.3f}{one.bound_ns / 1e6:12.3f}{one.gap * 100:9.2f}"
            f"{one.spread.distinct_columns:9.2f}  {mesh_text(one.mesh)}  {one.strategy}  {file}"
        )
    if mesh_text(first.mesh) != mesh_text(second.mesh):
        return "\n".join([*lines, "owners are not compared: the meshes differ\n"])
    if [one.name for one in first.inventory] != [one.name for one in second.inventory]:
        return "\n".join([*lines, "owners are not compared: stacks are divided in other parts\n"])
    owners = zip(first.inventory, first.owner, second.owner, strict=True)
    moves = [f"{parameter.name}: owner {one} -> {other}" for parameter, one, other in owners if one != other]
    lines += moves[:_MOST_MOVES]
    if len(moves) > _MOST_MOVES:
        lines.append(f"... and {len(moves) - _MOST_MOVES} more")
    return "\n".join([*lines, f"{len(moves)} of {parameters_text(first.inventory)} have another owner\n"])


def models(as_json: bool) -> str:
    """Returns the models, devices and networks of the catalog."""
    rows = [_described(_plan.model(name)) for name in _plan.model_names()]
    if as_json:
        found = {"models": rows, "devices": _plan.device_names(), "networks": _plan.network_names()}
        return json.dumps(found) + "\n"
    lines = ["name             matrices  10^9 elements  shapes  description"]
    for row in rows:
        lines.append(
            f"{row['name']:<15}{row['matrices']:10d}{row['elements'] / 1e9:15.3f}{row['shapes']:8d}  "
            f"{'[stand-in] ' if row['stand_in'] else ''}{row['description']}"
        )
    lines.append(f"devices: {' '.join(_plan.device_names())}")
    return "\n".join([*lines, f"networks: {' '.join(_plan.network_names())}\n"])


def _described(model: _plan.Model) -> dict[str, Any]:
    items = model.inventory
    return {
        "name": model.name,
        "matrices": sum(number for item in items for number, _, _ in item.sizes_of_costs()),
        "elements": sum(item.num_matrices * item.rows * item.cols for item in items),
        "shapes": len({item.shape_text() for item in items}),
        "stand_in": model.stand_in,
        "description": model.description,
        "source": model.source,
    }
