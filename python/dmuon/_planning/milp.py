"""The paper's formulation of the assignment (eq. owner_assignment), solved by SciPy: `pip install dmuon[milp]`.

The default is `load_balance`, because this formulation does not scale: a thousand variables take HiGHS minutes. It
serves for comparison.
"""

from __future__ import annotations

import logging

from dmuon import _plan
from dmuon._setup.strategies import MILP

logger = logging.getLogger("dmuon")

MOST_VARIABLES = 20_000  # S_thr of the paper: load_balance decides larger problems
TIME_LIMIT_S = 60.0

# One shape's number of parameters and (size, nanoseconds) of its batches.
ShapeTimes = tuple[int, list[tuple[int, int]]]


class NoSolutionError(ValueError):
    """The solver found no assignment, within its time or at all."""


def solve(shapes: list[ShapeTimes], num_owners: int) -> tuple[list[list[int]], bool]:
    """Chooses each owner's batches of each shape and size, so that the slowest owner takes least time.

    Args:
        shapes: the parameters to assign and the times of their batches.
        num_owners: R * G, the slots of the mesh.

    Returns:
        [owners][shapes] numbers of parameters; and True if they are proved optimal (to SciPy's 0.01 %).

    Raises:
        NoSolutionError: SciPy found nothing within TIME_LIMIT_S.
        ValueError: SciPy is missing.
    """
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import bmat, eye, kron
    except ImportError as error:
        raise ValueError(f"milp: expected SciPy (pip install 'dmuon[milp]'): {error}") from error
    kinds = [(s, size, ns) for s, (_, batches) in enumerate(shapes) for size, ns in batches]
    longest = max((ns for _, _, ns in kinds), default=1) or 1
    # Parameters of each shape in a batch of each kind. Every parameter is in one batch, of any owner.
    held = np.zeros((len(shapes), len(kinds)))
    for kind, (s, size, _) in enumerate(kinds):
        held[s, kind] = size
    wanted = np.array([number for number, _ in shapes])
    # x[kind, owner], then the makespan in units of the longest batch.
    times = np.array([[ns / longest for _, _, ns in kinds]])
    parameters_done = kron(held, np.ones((1, num_owners)))
    owner_loads, minus_makespan = kron(times, eye(num_owners)), np.full((num_owners, 1), -1)
    matrix = bmat([[parameters_done, None], [owner_loads, minus_makespan]])
    most = [shapes[s][0] // size for s, size, _ in kinds for _ in range(num_owners)]
    result = milp(
        [0] * len(most) + [1],
        constraints=LinearConstraint(matrix.tocsr(), [*wanted, *[-np.inf] * num_owners], [*wanted, *[0] * num_owners]),
        integrality=[1] * len(most) + [0],
        bounds=Bounds(0, [*most, np.inf]),
        options={"time_limit": TIME_LIMIT_S},
    )
    if result.x is None:
        raise NoSolutionError(f"milp: no assignment within {TIME_LIMIT_S:g} s: {result.message}")
    batches = np.rint(result.x[:-1]).astype(int).reshape(len(kinds), num_owners)
    return (held @ batches).T.astype(int).tolist(), result.status == 0


def make_plan(
    items: list[_plan.Parameter], mesh: _plan.Mesh, costs: _plan.CostTable, options: _plan.PlanOptions
) -> _plan.Plan:
    """Makes a plan with SciPy's assignment.

    Beyond MOST_VARIABLES, or if SciPy finds none, logs a warning and uses load_balance.

    Raises:
        ValueError: SciPy is missing, or a shape has no costs.
    """
    # Parameters that one column must own are dealt afterwards.
    shapes = _shape_times([item for item in items if item.column is None], costs)
    size = sum(len(batches) for _, batches in shapes) * mesh.num_owners() + 1
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
    """Returns the times of each shape, in the order of first appearance."""
    alike: dict[str, list[_plan.Parameter]] = {}
    for item in items:
        alike.setdefault(item.shape_text(), []).append(item)
    return [(len(parameters), costs.batches(parameters[0])) for parameters in alike.values()]
