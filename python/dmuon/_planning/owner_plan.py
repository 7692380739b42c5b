"""The plan as Python sees it: who owns what. Nothing here imports torch, so that the command starts at once."""

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
MOST_OWNERS = 1 << 15  # of a mesh that need not exist: the catalogue's largest models take some 15 s there

T = TypeVar("T")


class Plan:
    """Owners and batches of the parameters that Muon updates; equal on every rank. Prints as a table.

    Attributes:
        owner: for each parameter, or part of one that is divided, in module order, the slot of its owner, which is
            replicate * num_shards + shard.
        batches: (slot, parameters) of equal shapes that are updated together.
        loads_ms: predicted milliseconds of each slot's update.
        makespan_ms: of the slowest.
        bound_ms: no plan can have a smaller makespan under the same costs; the plan carries a proof.
        gap: makespan / bound - 1.
        memory_bytes: of each slot at the peak of a step.
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
        """A plan from the file of `save`, or of `dmuon plan --save`.

        Raises:
            ValueError: the file cannot be read, or does not hold a plan.
        """
        return cls(from_file(path, _plan.Plan.from_json, "plan: cannot read"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; `dedicate_params(..., plan=path)` takes it."""
        Path(path).write_text(self.to_json() + "\n")

    def save_picture(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Draws every owner's predicted time beside the bound, and on which columns each unit's weights lie.

        Args:
            path: the ending names the format, such as .svg or .png.
            title: the first line of the picture.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: matplotlib does not write this format.
        """
        pictures.save(self.native, path, title, "Plan.save_picture")

    def to_json(self) -> str:
        """The plan as JSON, as a rank receives it."""
        return self.native.to_json()

    def table(self, max_rows: int = 16) -> str:
        """What each owner holds and its predicted time, the slowest first."""
        return table(self.native, max_rows)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return (
            f"<dmuon.Plan: {self.strategy}, {parameters_text(self.native.inventory)} on {len(self.loads_ms)} owners, "
            f"makespan {self.makespan_ms:.3f} ms>"
        )


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


def sizes_of(item: _plan.Parameter) -> tuple[int, int, int]:
    """Number, rows and columns of the matrices that are orthogonalised, which is what costs depend on."""
    return item.num_matrices * item.column_blocks, item.rows, item.cols // item.column_blocks


def from_file(path: str | os.PathLike[str], read: Callable[[str], T], problem: str) -> T:
    """What `read` makes of the file's text.

    Raises:
        ValueError: the file cannot be read, or `read` refuses its text; the message is `problem`, path and reason.
    """
    try:
        return read(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{problem} {str(path)!r}: {error}") from error
