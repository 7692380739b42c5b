"""The text of a plan, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dmuon import _plan

_MIB = 1024.0 * 1024.0
_MOST_UNITS = 8


def mesh_text(mesh: _plan.Mesh) -> str:
    """Returns a text such as "2 x 8, tensor parallel 2"."""
    text = f"{mesh.num_replicates} x {mesh.num_shards}"
    return text + (f", tensor parallel {mesh.tensor_parallel}" if mesh.tensor_parallel > 1 else "")


def parameters_text(inventory: Sequence[_plan.Parameter]) -> str:
    """Returns a text such as "12 parameters", or "96 parameters or parts" if stacks are divided."""
    parts = " or parts" if any(parameter.continues for parameter in inventory) else ""
    return f"{len(inventory)} parameters{parts}"


def gap_text(plan: _plan.Plan) -> str:
    """Returns a text such as ", gap 0.15 %", or "" if there is no work."""
    return f", gap {plan.gap * 100:.2f} %" if plan.bound_ns > 0 else ""


def table(plan: _plan.Plan, max_rows: int, inter_bandwidth: float | None = None) -> str:
    """Returns a table of the owners, the slowest first, then makespan, bound, gap and spread.

    Args:
        plan: the plan to show.
        max_rows: the most owners to show, and the most units, which are at most 8.
        inter_bandwidth: bytes a second of a node in each direction. If given, the table has the wire time of a step.
    """
    mesh, loads, spread, batches = plan.mesh, plan.loads_ns, plan.spread, plan.batches
    num_batches = Counter(owner for owner, _ in batches)
    num_parameters = Counter(plan.owner)
    memory = plan.memory
    order = sorted(range(len(loads)), key=lambda owner: -loads[owner])
    shown = order[: max(0, max_rows)]
    lines = [
        f"strategy {plan.strategy}, mesh {mesh_text(mesh)}, "
        f"{parameters_text(plan.inventory)} in {len(batches)} batches",
        f"costs: {plan.costs.source}",
        " owner  node  column  parameters  batches  state MiB  total MiB  predicted ms",
        *(
            f"{owner:6d}{mesh.replicate_of(owner):6d}{mesh.shard_of(owner):8d}{num_parameters[owner]:12d}"
            f"{num_batches[owner]:9d} {memory[owner].state / _MIB:10.2f} {memory[owner].total() / _MIB:10.2f}"
            f" {loads[owner] / 1e6:11.3f}"
            for owner in shown
        ),
    ]
    if len(shown) < len(order):
        lines.append(f"   ... and {len(order) - len(shown)} faster owners")
    least, most = min(spread.column_bytes) / _MIB, max(spread.column_bytes) / _MIB
    lines += [
        f"makespan {plan.makespan_ns / 1e6:.3f} ms, no plan is below {plan.bound_ns / 1e6:.3f} ms{gap_text(plan)}",
        f"window of {max(1, plan.options.lookahead)} units: {spread.distinct_columns:.2f} of {mesh.num_shards} columns"
        f", {spread.repeats:.2f} repeats, busiest column {spread.busiest_column:.2f} x the mean",
        f"weights of a column: {least:.2f} to {most:.2f} MiB",
    ]
    lines += _between_nodes(plan, max_rows)
    if inter_bandwidth is not None:
        lines.append(_wire_text(plan.wire_time(inter_bandwidth), inter_bandwidth))
    return "\n".join(lines) + "\n"


def _between_nodes(plan: _plan.Plan, max_rows: int) -> list[str]:
    """Returns the bytes that units send between nodes, those first whose busiest node is furthest above the mean."""
    num_nodes, num_columns, units = plan.mesh.num_replicates, plan.mesh.num_shards, plan.spread.units
    if num_nodes == 1 or not units:
        return []
    order = sorted(units, key=lambda unit: unit.bytes - num_nodes * unit.most_of_node)
    shown = order[: max(0, min(max_rows, _MOST_UNITS))]
    sums = [sum(values) for values in zip(*((u.bytes, u.most_of_node, u.most_of_column) for u in units), strict=True)]
    worst = max(unit.most_of_node / unit.bytes for unit in units) * num_nodes
    lines = [
        f"units: busiest node {sums[1] / sums[0] * num_nodes:.2f} x the mean, at worst {worst:.2f} x; "
        f"busiest column {sums[2] / sums[0] * num_columns:.2f} x",
        "        weights  busiest node, MiB  idlest node, MiB  column",
        "  unit      MiB    sends  receives   sends  receives   x mean",
    ]
    for unit in shown:
        nodes = [
            f"{(num_nodes - 1) * own / _MIB:9.2f}{(unit.bytes - own) / _MIB:10.2f}"
            for own in (unit.most_of_node, unit.least_of_node)
        ]
        column = unit.most_of_column / unit.bytes * num_columns
        lines.append(f"{unit.unit:6d}{unit.bytes / _MIB:9.2f}{nodes[0]}{nodes[1]}{column:9.2f}")
    if len(shown) < len(order):
        lines.append(f"   ... and {len(order) - len(shown)} units that are as even or more")
    return [*lines, "the figures are of weights; gradients travel the other way"]


def _wire_text(wire: _plan.WireTime, bytes_per_s: float) -> str:
    return (
        f"between nodes at {bytes_per_s * 8 / 1e9:g} Gbit/s each way: weights {wire.publish_ms:.3f} ms and gradients "
        f"{wire.route_ms:.3f} ms a step, together at least {wire.bound_ms:.3f} ms"
    )
