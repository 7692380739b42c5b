"""The names of the strategies that choose owners."""

from __future__ import annotations

from dmuon import _plan

MILP = "milp"  # the only one that is not in C++: SciPy solves it, see _planning/milp.py


def strategies() -> list[str]:
    """Returns all names. The default comes first."""
    return [*_plan.strategy_names(), MILP]


def reads_costs(strategy: str) -> bool:
    """Returns False if the strategy chooses the same owners whatever batches cost."""
    return strategy == MILP or _plan.reads_costs(strategy)


def require_strategy(strategy: str, function: str) -> None:
    """Raises a ValueError that names `function`, unless there is such a strategy."""
    if strategy not in strategies():
        raise ValueError(f"{function}: strategy: expected one of {strategies()}, got {strategy!r}")
