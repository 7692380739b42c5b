"""The paper's own formulation of the assignment (eq. owner_assignment), solved by SciPy: `pip install dmuon[milp]`.

It does not scale (a thousand variables take HiGHS minutes), so `load_balance` is the default; this one is there to
compare with.
"""

from __future__ import annotations

import logging

from dmuon import _plan
from dmuon._setup.strategies import MILP

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


def make_plan(
    items: list[_plan.Parameter], mesh: _plan.Mesh, costs: _plan.CostTable, options: _plan.PlanOptions
) -> _plan.Plan:
    """A plan with SciPy's assignment. Beyond MOST_VARIABLES, or in vain, load_balance decides and the log says so.

    Raises:
        ValueError: SciPy is missing, or a shape has no costs.
    """
    shapes = _shape_times(items, costs)
    size = num_variables(shapes, mesh.num_owners())
    try:
        if size > MOST_VARIABLES:
            raise NoSolutionError(f"milp: {size} variables, more than {MOST_VARIABLES}")
        counts, proved = solve(shapes, mesh.num_owners())
    except NoSolutionError as error:
        logger.warning("dmuon: %s: load_balance decides", error)
        return _plan.make_plan(items, mesh, "load_balance", costs, options)
    if not proved:
        logger.warning("dmuon: milp: not proved optimal within %g s", TIME_LIMIT_S)
    return _plan.make_plan_from_counts(items, mesh, MILP, counts, costs, options)


def _shape_times(items: list[_plan.Parameter], costs: _plan.CostTable) -> list[ShapeTimes]:
    """By shape, in the order in which they first appear."""
    alike: dict[tuple[int, int, bool], list[_plan.Parameter]] = {}
    for item in items:
        alike.setdefault((item.rows, item.cols, item.tensor_parallel), []).append(item)
    return [(len(matrices), costs.batches(matrices[0])) for matrices in alike.values()]
