"""The paper's own formulation of the assignment (eq. owner_assignment), solved by SciPy: `pip install dmuon[milp]`.

It does not scale (a thousand variables take HiGHS minutes), so `load_balance` is the default; this one is there to
compare with. The file is also a program that reads an instance on stdin and writes counts, for the command `dmuon`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmuon import _C

logger = logging.getLogger("dmuon")

MOST_VARIABLES = 20_000  # S_thr of the paper: beyond, load_balance decides
TIME_LIMIT_S = 60.0

# Of one shape: the number of matrices and (size, nanoseconds) of its batches.
ShapeTimes = tuple[int, list[tuple[int, int]]]


class NoSolutionError(ValueError):
    """The solver found no assignment, in its time or at all."""


def num_variables(shapes: list[ShapeTimes], num_owners: int) -> int:
    """x[s, b, r], and the makespan."""
    return sum(len(batches) for _, batches in shapes) * num_owners + 1


def solve(
    shapes: list[ShapeTimes], num_owners: int, time_limit_s: float = TIME_LIMIT_S
) -> tuple[list[list[int]], bool]:
    """Batches of each shape and size for each owner, so that the slowest takes least.

    Args:
        shapes: what there is to assign.
        num_owners: R.
        time_limit_s: for the solver.

    Returns:
        [owners][shapes] numbers of matrices, and whether they are proved optimal (to SciPy's 0.01 %).

    Raises:
        NoSolutionError: SciPy found nothing within the time.
        ValueError: SciPy is missing.
    """
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import lil_matrix
    except ImportError as error:
        raise ValueError(f"milp: expected SciPy (pip install 'dmuon[milp]'): {error}") from error
    kinds = [(s, size, ns) for s, (_, batches) in enumerate(shapes) for size, ns in batches]
    longest = max((ns for _, _, ns in kinds), default=1) or 1
    width = len(kinds) * num_owners + 1  # x[kind, owner], then the makespan in units of the longest batch
    matrix = lil_matrix((len(shapes) + num_owners, width))
    for k, (s, size, ns) in enumerate(kinds):
        for owner in range(num_owners):
            matrix[s, k * num_owners + owner] = size
            matrix[len(shapes) + owner, k * num_owners + owner] = ns / longest
    matrix[len(shapes) :, width - 1] = -1
    wanted = np.array([number for number, _ in shapes], dtype=float)
    low = np.concatenate([wanted, np.full(num_owners, -np.inf)])
    high = np.concatenate([wanted, np.zeros(num_owners)])
    most = [shapes[s][0] // size for s, size, _ in kinds for _ in range(num_owners)]
    result = milp(
        np.eye(1, width, width - 1).ravel(),
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        integrality=np.concatenate([np.ones(width - 1), [0]]),
        bounds=Bounds(0, np.array([*most, np.inf])),
        options={"time_limit": time_limit_s},
    )
    if result.x is None:
        raise NoSolutionError(f"milp: no assignment within {time_limit_s:g} s: {result.message}")
    counts = [[0] * len(shapes) for _ in range(num_owners)]
    for k, (s, size, _) in enumerate(kinds):
        for owner in range(num_owners):
            counts[owner][s] += size * round(result.x[k * num_owners + owner])
    return counts, result.status == 0


def make_plan(items: list[_C.Matrix], mesh: tuple[int, int], table: _C.CostTable, options: _C.PlanOptions) -> _C.Plan:
    """A plan with SciPy's assignment; beyond MOST_VARIABLES, or in vain, load_balance's, which is said.

    Args:
        items: the matrices, none over tensor parallelism.
        mesh: (replicates, shards), each 1 or more.
        table: the costs.
        options: as for load_balance.

    Raises:
        ValueError: SciPy is missing, or a shape has no costs.
    """
    from dmuon import _C

    native, num_owners = _C.Mesh(*mesh), mesh[0] * mesh[1]
    shapes = _shape_times(items, table)
    size = num_variables(shapes, num_owners)
    try:
        if size > MOST_VARIABLES:
            raise NoSolutionError(f"milp: {size} variables, more than {MOST_VARIABLES}")
        counts, proved = solve(shapes, num_owners)
    except NoSolutionError as error:
        logger.warning("dmuon: %s: load_balance decides", error)
        return _C.make_plan(items, native, "load_balance", table, options)
    if not proved:
        logger.warning("dmuon: milp: not proved optimal within %g s", TIME_LIMIT_S)
    return _C.make_plan_from_counts(items, native, "milp", counts, table, options)


def _shape_times(items: list[_C.Matrix], table: _C.CostTable) -> list[ShapeTimes]:
    """By shape, in the order in which they first appear. A table's entries over tensor parallelism are for others."""
    times = {
        (entry["rows"], entry["cols"]): [(batch["size"], batch["ns"]) for batch in entry["batches"]]
        for entry in json.loads(table.to_json())["shapes"]
        if not entry["tensor_parallel"]
    }
    numbers = Counter((item.rows, item.cols) for item in items)
    for rows, cols in numbers:
        if (rows, cols) not in times:
            raise ValueError(f"costs: expected an entry for shape {rows} x {cols}; got none")
    return [(number, times[shape]) for shape, number in numbers.items()]


def _main() -> None:
    instance: dict[str, Any] = json.load(sys.stdin)
    shapes = [(s["num_matrices"], [(b["size"], b["ns"]) for b in s["batches"]]) for s in instance["shapes"]]
    if num_variables(shapes, instance["num_owners"]) > MOST_VARIABLES:
        sys.exit(f"milp: more than {MOST_VARIABLES} variables")
    try:
        counts, proved = solve(shapes, instance["num_owners"])
    except ValueError as error:
        sys.exit(str(error))
    json.dump({"counts": counts, "proved": proved}, sys.stdout)


if __name__ == "__main__":
    _main()
