"""Schedulers of learning rates that move to another optimizer before their first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer, lr_scheduler

# These compute from a group's own rate, which they store in base_lrs alone. Others store rates or momenta of groups.
_MOVABLE = (
    lr_scheduler.LambdaLR,
    lr_scheduler.StepLR,
    lr_scheduler.MultiStepLR,
    lr_scheduler.ConstantLR,
    lr_scheduler.LinearLR,
    lr_scheduler.ExponentialLR,
    lr_scheduler.PolynomialLR,
    lr_scheduler.CosineAnnealingLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
)
_OF_SEVERAL = (lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler)


def check_movable(scheduler: Any, old: Optimizer) -> None:
    """Raises ValueError, in the name of `prepare`, if `move_scheduler` cannot move the scheduler."""
    way_out = "Or pass a function that makes one: scheduler=lambda optimizer: LambdaLR(optimizer, ...)."
    for part in _parts(scheduler):
        name = type(part).__name__
        if type(part) not in _MOVABLE:
            expected = ", ".join(kind.__name__ for kind in (*_MOVABLE, *_OF_SEVERAL))
            raise ValueError(f"prepare: scheduler: expected one of {expected}, got {name}. {way_out}")
        if part.last_epoch > 0:
            raise ValueError(
                f"prepare: scheduler: expected one that has made no step, got a {name} after step {part.last_epoch}. "
                "Expected: load its state after dmuon.prepare."
            )
        if len(set(getattr(part, "lr_lambdas", []))) > 1:
            raise ValueError(
                f"prepare: scheduler: expected one function for all groups, got a {name} with several, and the groups "
                f"of dmuon.Muon are others. {way_out}"
            )
    if not (factors := _factors(old)):
        raise ValueError(
            "prepare: optimizer: expected an lr other than 0, because the scheduler has multiplied it already, got 0. "
            f"{way_out}"
        )
    if len(factors) > 1:
        raise ValueError(
            f"prepare: scheduler: expected one factor for the rates of all groups, got {sorted(factors)}. {way_out}"
        )


def move_scheduler(scheduler: Any, old: Optimizer, new: Optimizer) -> None:
    """Lets the scheduler go on with the groups of `new`. Their present rates are the rates that it multiplies."""
    (factor,) = _factors(old)
    # Sets initial_lr and the first rate of each group, and watches step(), as every scheduler's constructor does.
    first = lr_scheduler.LambdaLR(new, lambda _: factor)
    for part in (scheduler, *_parts(scheduler)):
        part.optimizer = new
        if hasattr(part, "base_lrs"):
            part.base_lrs = list(first.base_lrs)
        if lambdas := getattr(part, "lr_lambdas", []):
            part.lr_lambdas = lambdas[:1] * len(new.param_groups)
        part._last_lr = first.get_last_lr()


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yields the schedulers inside of those that run several."""
    if type(scheduler) in _OF_SEVERAL:
        for part in scheduler._schedulers:
            yield from _parts(part)
    else:
        yield scheduler


def _factors(optimizer: Optimizer) -> set[float]:
    """Returns the factors between the groups' first rates and their own: one, if the scheduler treats them alike."""
    own = [(float(group["lr"]), float(group["initial_lr"])) for group in optimizer.param_groups]
    return {round(lr / initial, 12) for lr, initial in own if initial != 0}
