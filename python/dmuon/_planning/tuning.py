"""Finds the fastest way to orthogonalise each shape here, for `dmuon tune`. Muon reads the cached results."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from dmuon import _C
from dmuon._planning.choices import Result, Setting, Shape, cached, store
from dmuon._planning.clock import device_ns
from dmuon._planning.costs import is_short_of_memory
from dmuon._planning.elementwise import FUSED, fastest_elementwise, fastest_last_product
from dmuon._planning.rounds import LEAST_ROUNDS, in_turns, winner
from dmuon._setup.hyperparameters import PlainChoice, choice_of, plain_choice

_LEAST_RUNS = 12  # of each candidate, including its check
_HOPELESS = 2.0  # times the default's time: such a candidate is not timed further
_BLOCK_S = 2e-3  # the least seconds of a block of repeated calls
_POOL_ELEMENTS = 1 << 24  # elements for batches, which take turns: 64 MiB, more than caches hold
_MOST_ERROR = 1.3  # times the direct form's error
_EXACT_FLOPS = 1 << 32  # of one product: larger matrices are compared with the direct form in fp32
# The shape whose time predicts the times of larger shapes before they run. On accelerators it is one that takes longer
# than the host needs to issue it.
_GAUGE, _GAUGE_OF_ACCELERATORS = (1, 256, 256), (1, 2048, 2048)


_Errors = dict[PlainChoice, list[float]]


class _NotReachedError(Exception):
    """No result for a shape. The message says why."""


def tune(shapes: Iterable[Shape], setting: Setting, budget_s: float) -> tuple[list[Result], dict[Shape, str]]:
    """Times the shapes that the cache lacks, small ones first, and stores each result at once.

    If a shape comes with several numbers of matrices, the largest counts.

    Returns:
        The results, in the order of `shapes`; and for shapes without a result the reason.
    """
    numbers: dict[tuple[int, int], int] = {}
    for number, rows, cols in shapes:
        timed = _timed_number(number, rows, cols, setting)
        numbers[rows, cols] = max(timed, numbers.get((rows, cols), 0))
    known = cached(setting)
    missing = [(number, *sides) for sides, number in numbers.items() if sides not in known or known[sides][0] < number]
    missing.sort(key=_work)
    unreached: dict[Shape, str] = {}
    pool = _random(_POOL_ELEMENTS if missing else 0, setting)
    words = "dmuon tunes shapes: |{bar}| {n:.0f} s of at most {total:.0f} s"
    with tqdm(total=budget_s, bar_format=words, leave=False, delay=1.0, disable=None) as bar:
        budget = _Budget(budget_s, bar)
        for index, shape in enumerate(missing):
            budget.share(len(missing) - index)
            try:
                result = _measure(shape, setting, pool, budget)
            except _NotReachedError as reason:
                if shape[1:] not in known:  # else there is a result for fewer matrices
                    unreached[shape] = str(reason)
                continue
            known[result[1:3]] = result
            store(result, setting)
    return [known[sides] for sides in numbers if (numbers[sides], *sides) not in unreached], unreached


class _Budget:
    """The seconds left. Each shape gets an equal share of what the shapes before it did not use."""

    def __init__(self, seconds: float, bar: Any) -> None:
        self._end, self._seconds, self._bar = time.monotonic() + seconds, seconds, bar
        self._share_end = self._end

    def share(self, num_shapes: int) -> None:
        self._share_end = time.monotonic() + self.left() / num_shapes

    def left(self) -> float:
        left = self._end - time.monotonic()
        self._bar.update(min(self._seconds - left, self._seconds) - self._bar.n)
        return left

    def of_share(self) -> float:
        return min(self._share_end - time.monotonic(), self.left())


def _measure(shape: Shape, setting: Setting, pool: Tensor, budget: _Budget) -> Result:
    number, rows, cols = shape
    size = number * rows * cols
    default, *others = (one for one in setting.candidates(rows, cols) if one.backend != FUSED)
    late = "not reached within the budget"

    def seconds(choice: _C.Choice, times: int = 1) -> float:
        if budget.left() <= 0:
            raise _NotReachedError(late)
        return _seconds(choice, batches, setting, times)

    least_runs = _LEAST_RUNS * (1 + len(others))
    try:
        is_large = _work(shape) > _work(_gauge(setting))
        # Half, because larger products run at a higher rate.
        if is_large and least_runs * _guessed_seconds(shape, pool, setting) / 2 > budget.left():
            raise _NotReachedError(late)
        enough = pool if size <= len(pool) else _random(size, setting)
        batches = enough[: len(enough) // size * size].view(-1, *shape)
        if not is_large:
            seconds(default)  # the first call of a shape may prepare kernels
        # Twice, because other work of the machine may delay one call.
        if all(least_runs * seconds(default) > budget.left() for _ in range(2)):
            raise _NotReachedError(late)
        errors = _errors(rows, cols, setting, [default, *others])
        timed = [default, *(one for one in others if _is_exact(one, errors, setting))]
        once = [min(seconds(choice), seconds(choice)) for choice in timed]
        hopeful = [at for at, spent in enumerate(once) if spent <= _HOPELESS * once[0]]
        times = max(1, min(1000, math.ceil(_BLOCK_S / max(once[0], 1e-9))))
        if LEAST_ROUNDS * times * sum(once[at] for at in hopeful) > budget.left():
            raise _NotReachedError(late)

        def may_go_on() -> bool:
            return budget.of_share() > 0

        rounds = in_turns(hopeful, lambda at: seconds(timed[at], times) / times, may_go_on)
        best, ratio = winner(rounds)
        elementwise = fastest_elementwise(timed[best], batches, setting, may_go_on)
        found = choice_of(*plain_choice(timed[best])[:-1], elementwise)
        found = fastest_last_product(found, batches, setting, may_go_on)
    except Exception as error:
        if is_short_of_memory(error):
            raise _NotReachedError("short of memory") from None
        raise
    took = {at: int(1e9 * statistics.median(one[at] for one in rounds)) for at in (0, best)}
    most = {at: max(errors[plain_choice(timed[at])]) for at in (0, best)}
    usual = plain_choice(default)
    return Result._make((*shape, *plain_choice(found), took[best], most[best], *usual, took[0], most[0], ratio))


def _random(elements: int, setting: Setting) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # a generator of its own: the user's does not change
    return torch.randn(elements, generator=generator, device="cpu").to(setting.device)


def _work(shape: Shape) -> int:
    return math.prod(shape) * min(shape[1:])


def _guessed_seconds(shape: Shape, pool: Tensor, setting: Setting) -> float:
    gauge = _gauge(setting)
    batches = pool[: math.prod(gauge)].view(1, *gauge)
    choice = setting.candidates(*gauge[1:])[0]
    return min(_seconds(choice, batches, setting, 1) for _ in range(3)) * _work(shape) / _work(gauge)


def _gauge(setting: Setting) -> Shape:
    return _GAUGE if setting.device.type == "cpu" else _GAUGE_OF_ACCELERATORS


def _timed_number(number: int, rows: int, cols: int, setting: Setting) -> int:
    """Returns the number of matrices to time: at least eight of those that go in batches.

    A choice holds for batches of any size.
    """
    least = 8 if setting.candidates(rows, cols)[0].batched else 1
    return max(1, min(max(number, least), _POOL_ELEMENTS // (rows * cols)))


def _run(x: Tensor, choice: _C.Choice, setting: Setting) -> Tensor:
    rows = setting.coefficients
    y: Tensor = _C.orthogonalize(x, rows, len(rows), 0.0, setting.ns_dtype, choice=choice)
    return y


def _seconds(choice: _C.Choice, batches: Tensor, setting: Setting, times: int) -> float:
    """Returns the seconds that `times` calls take together, each on another batch than the call before."""

    def calls() -> None:
        for index in range(times):
            _run(batches[index % len(batches)], choice, setting)

    return device_ns(calls, setting.device) / 1e9


def _errors(rows: int, cols: int, setting: Setting, choices: list[_C.Choice]) -> _Errors:
    """The errors of each choice, relative to the polynomial.

    There are three kinds of matrices: Gaussian ones; ones of condition 1e3 and more; and ones in which one direction
    has 0.7 of the squared norm, as the inputs' mean has in a gradient.
    """
    number = max(1, min(8, 2**16 // (rows * cols)))
    x = torch.randn(3, number, rows, cols, generator=torch.Generator().manual_seed(1), device="cpu")
    decay = torch.logspace(0, -3, min(rows, cols), device="cpu")
    x[1] *= decay[:, None] if rows <= cols else decay
    generator = torch.Generator().manual_seed(2)
    direction = torch.randn(rows, 1, generator=generator, device="cpu") * torch.randn(
        1, cols, generator=generator, device="cpu"
    )
    x[2] += (7 / 3) ** 0.5 * direction
    x = x.to(setting.device).view(-1, rows, cols)
    if rows * cols * min(rows, cols) <= _EXACT_FLOPS:
        exact = polynomial(x, setting.coefficients)
    else:
        coefs = setting.coefficients
        exact = _C.orthogonalize(x, coefs, len(coefs), 0.0, torch.float32, form=_C.Form.DIRECT).double()
    norms = exact.view(3, -1).norm(dim=1)
    return {
        plain_choice(one): ((_run(x, one, setting).double() - exact).view(3, -1).norm(dim=1) / norms).tolist()
        for one in choices
    }


def polynomial(x: Tensor, coefficients: list[tuple[float, float, float]]) -> Tensor:
    """Computes Newton-Schulz almost without rounding: in fp64, by torch's products alone."""
    tall = x.shape[-2] > x.shape[-1]
    y: Tensor = (x.mT if tall else x).double()
    y = y / torch.linalg.matrix_norm(y, keepdim=True)
    for a, b, c in coefficients:
        r = y @ y.mT
        y = a * y + (b * r + c * (r @ r)) @ y
    return y.mT if tall else y


def _is_exact(choice: _C.Choice, errors: _Errors, setting: Setting) -> bool:
    """True if all errors are at most 1.3 times the direct form's least error, plus a floor for rounding alone."""
    unit = torch.finfo(setting.ns_dtype).eps / 2
    slope = math.prod(a for a, _, _ in setting.coefficients)  # growth of small singular values and of their rounding
    # fp16: what mirrored triangles add where rounding alone decides (coefficients.h), a tenth of bf16's errors.
    floors = {torch.float16: 2 * unit, torch.bfloat16: unit / 2}
    floor = floors.get(setting.ns_dtype, 4 * unit * abs(slope))
    direct = [error for (_, form, *_), error in errors.items() if form == "DIRECT"]
    pairs = zip(errors[plain_choice(choice)], *direct, strict=True)
    return all(error <= _MOST_ERROR * min(of_direct) + floor for error, *of_direct in pairs)
