"""The plan in Python: the owner of each parameter. Imports no torch, so that the command starts at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dmuon import _plan
from dmuon._planning import milp, pictures
from dmuon._planning.table import parameters_text, table
from dmuon._setup.strategies import MILP

DEFAULT_DEVICE = "a100-sxm4-80gb"
MOST_OWNERS = 1 << 15  # on a mesh that need not exist: the catalogue's largest models take some 15 s there

T = TypeVar("T")


class Plan:
    """Owners and batches of the parameters that Muon updates, equal on every rank. Prints as a table.

    Attributes:
        owner: each parameter's owner, in module order: the slot, replicate * num_shards + shard. With T ranks of tensor
            parallelism a slot's ranks are owners: slot * T + tensor rank. Parts of a divided parameter count one by
            one.
        batches: (owner, parameters) of equal shapes that are updated together.
        loads_ms: predicted milliseconds of each owner's update.
        makespan_ms: predicted milliseconds of the slowest owner.
        bound_ms: the least makespan that any plan can have under the same costs. The plan carries a proof.
        gap: the value makespan / bound - 1.
        memory_bytes: bytes of each owner at the peak of a step.
    """

    def __init__(self, plan: _plan.Plan) -> None:
        self.native = plan
        self.strategy: str = plan.strategy
        self.owner: list[int] = plan.owner
        self.batches: list[tuple[int, list[int]]] = plan.batches
        self.loads_ms: list[float] = [ns / 1e6 for ns in plan.loads_ns]
        self.makespan_ms: float = plan.makespan_ns / 1e6
        self.bound_ms: float = plan.bound_ns / 1e6
        self.gap: float = plan.gap
        self.memory_bytes: list[int] = plan.memory_bytes

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan from a file that `save`, or `dmuon plan --save`, has written.

        Raises:
            ValueError: the file cannot be read, or does not hold a plan.
        """
        return cls(from_file(path, _plan.Plan.from_json, "plan: cannot read"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, for `dedicate_params(..., plan=path)`."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def save_picture(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Draws every owner's predicted time beside the bound, and the columns on which each unit's weights lie.

        Args:
            path: the ending names the format, such as .svg or .png.
            title: the picture's first line.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: matplotlib does not write this format.
        """
        pictures.save(self.native, path, title, "Plan.save_picture")

    def to_json(self) -> str:
        """Returns the plan as JSON, as ranks receive it."""
        return self.native.to_json()

    def table(self, max_rows: int = 16) -> str:
        """Returns a table of the owners, the slowest first: parameters and predicted time."""
        return table(self.native, max_rows)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return (
            f"<dmuon.Plan: {self.strategy}, {parameters_text(self.native.inventory)} on {len(self.loads_ms)} owners, "
            f"makespan {self.makespan_ms:.3f} ms>"
        )


def reserve_bytes(on_cpu: bool) -> int:
    """Returns `PlanOptions.reserve_bytes` for the device of the ranks."""
    return 0 if on_cpu else _plan.ACCELERATOR_RESERVE_BYTES


def decide(
    items: list[_plan.Parameter], mesh: _plan.Mesh, strategy: str, costs: _plan.CostTable, options: _plan.PlanOptions
) -> _plan.Plan:
    """Makes a plan by any of `strategies()`.

    Raises:
        ValueError: an argument is bad, no plan keeps to the memory limit, or SciPy is missing for `milp`.
    """
    if strategy == MILP:
        return milp.make_plan(items, mesh, costs, options)
    return _plan.make_plan(items, mesh, strategy, costs, options)


def from_file(path: str | os.PathLike[str], read: Callable[[str], T], problem: str) -> T:
    """Reads a file and returns `read` of its text.

    Raises:
        ValueError: the file cannot be read, or `read` refuses its text. The message is `problem`, path and reason.
    """
    try:
        return read(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{problem} {str(path)!r}: {error}") from error
