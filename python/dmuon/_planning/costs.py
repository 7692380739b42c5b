"""The costs c[s,b] of the owner path: measured on the ranks that will train, cached, loaded or modelled."""

from __future__ import annotations

import contextlib
import functools
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from dmuon import _C, _plan
from dmuon._planning.cache import CacheFile, device_name, machine_key
from dmuon._planning.clock import device_ns
from dmuon._planning.owner_plan import DEFAULT_DEVICE
from dmuon._setup.agreement import from_first, largest_unless, message_of
from dmuon._setup.hyperparameters import Tuned, native_group, resolved_coefficients
from dmuon._setup.ranks import Ranks

logger = logging.getLogger("dmuon")

VERSION = 3  # of the cached times and of the update that they time

BUDGET_S = 10.0  # for measuring, on all ranks together
_MOST_ROUNDS = 15
_LONGEST_SHARE = 0.05  # of the budget, for a single run
_DAY_NS = 86_400 * 10**9  # a longer cached time is damage

Shape = tuple[int, int, int]  # matrices of a parameter, rows, cols


class Job(NamedTuple):
    """One batch to measure."""

    shape: Shape
    size: int  # parameters


def measured_costs(
    ranks: Ranks,
    shapes: dict[Shape, int],
    muon: dict[str, Any],
    compute_dtypes: dict[Shape, torch.dtype],
    device: torch.device,
    tuned: Tuned,
) -> _plan.CostTable:
    """Returns the costs on these ranks: slot 0's cached ones, the others measured. Collective, equal on all ranks.

    Args:
        ranks: the ranks of the mesh.
        shapes: the number of parameters by shape.
        muon: Muon's hyperparameters.
        compute_dtypes: by shape, the dtype that updated weights are cast to.
        device: the device on which the owner path runs.
        tuned: the choices that the owner path runs by.
    """
    jobs = [Job(shape, size) for shape, number in shapes.items() for size in _plan.candidate_batches(shape, number)]

    def file() -> CacheFile:
        return CacheFile("costs", "times", _key(ranks, muon, compute_dtypes, device, tuned))

    times = from_first(ranks, lambda: {job: ns for job, ns in _cached_times(file()).items() if job in jobs})
    missing = [job for job in jobs if job not in times]
    scaled: set[Job] = set()
    if missing:
        found, scaled = measure(ranks, missing, muon, compute_dtypes, device, known=times, tuned=tuned)
        from_first(ranks, lambda: _store(file(), {job: ns for job, ns in found.items() if job not in scaled}))
        times |= found
    source = f"measured on {device_name(device)}, {ranks.size} ranks at once"
    if len(scaled) == len(jobs):
        source = f"model of {model_of(device)}"
    elif scaled:
        source += f"; {len(scaled)} batch{'' if len(scaled) == 1 else 'es'} scaled by the model"
    return _plan.CostTable(
        source, [(shape, [(j.size, times[j]) for j in jobs if j.shape == shape]) for shape in shapes]
    )


def measure(
    ranks: Ranks,
    jobs: list[Job],
    muon: dict[str, Any],
    compute_dtypes: dict[Shape, torch.dtype],
    device: torch.device,
    known: dict[Job, int],
    tuned: Tuned,
) -> tuple[dict[Job, int], set[Job]]:
    """Returns nanoseconds of each job, the median over rounds and maximum over ranks; and the scaled jobs. Collective.

    All ranks run the same job at the same time, because they will share the machine in training. A round runs all
    jobs, small ones first, so that a disturbance meets all of them. Rounds end with the budget, after any job.
    A job that takes more than a twentieth of the budget, twice, does not run again. The device's model scales the times
    of other jobs, `known` ones among them, for three kinds of jobs. First, jobs that by the times of others would take
    so long. Second, jobs that the budget does not reach. Third, jobs that lack memory on any rank.
    """
    model = from_first(ranks, lambda: model_of(device))  # one model for all ranks, which must choose alike
    group = native_group(muon, device, tuned)
    order = sorted(jobs, key=lambda job: (_modelled_ns(model, job), job))
    runs: dict[Job, list[int]] = {job: [] for job in jobs}  # nanoseconds of this rank
    least: dict[Job, int] = {}  # nanoseconds of the fastest run, at the slowest rank
    times = dict(known)
    failed: set[Job] = set()

    def run(job: Job) -> int:
        return _run(job, group, compute_dtypes[job.shape], device)

    begin = time.monotonic()
    longest_ns = BUDGET_S * _LONGEST_SHARE * 1e9
    words = "dmuon measures batches: |{bar}| {n:.0f} s of at most {total:.0f} s"
    hidden = None if ranks.owner == 0 else True  # None shows the bar on a terminal alone
    with tqdm(total=BUDGET_S, bar_format=words, leave=False, delay=1.0, disable=hidden) as bar:
        for job in order * _MOST_ROUNDS:
            # From its own fastest run; before its first two runs, from the times of other jobs, if there are any.
            least_ns = least[job] if job in least else _predicted(job, times, model) if times else 0
            if job in failed or least_ns > longest_ns:
                continue
            for _ in range(1 if runs[job] else 2):  # the first warms up
                sample = _sample(ranks, job, run, runs[job], begin)
                spent = sample.seconds
                if sample.short_of_memory:
                    failed.add(job)
                    times.pop(job, None)
                    break
                least[job], times[job] = sample.least_ns, sample.median_ns
            bar.update(min(spent, BUDGET_S) - bar.n)
            if spent > BUDGET_S:
                break
    if device.type == "cuda":
        torch.cuda.empty_cache()  # nothing else may need memory for such large batches
    scaled = {job for job in jobs if job not in times}
    if scaled and ranks.owner == 0:
        words = "dmuon: %d of %d batches are scaled by the model: too long, beyond the %g s, or (%d) short of memory"
        logger.warning(words, len(scaled), len(jobs), BUDGET_S, len(failed))
    return {job: times[job] if job in times else _predicted(job, times, model) for job in jobs}, scaled


def _predicted(job: Job, times: dict[Job, int], model: str) -> int:
    """Scales the model's time by measured over modelled time of the shape's largest batch.

    Without such a batch, scales by the median of that ratio over the five longest batches.
    """
    alike = [other for other in times if other.shape == job.shape]
    basis = [max(alike)] if alike else sorted(times, key=functools.partial(_modelled_ns, model))[-5:]
    ratio = statistics.median([times[other] / _modelled_ns(model, other) for other in basis] or [1.0])
    return max(1, int(_modelled_ns(model, job) * ratio))


@functools.cache
def _modelled_ns(model: str, job: Job) -> int:
    return max(1, _plan.modelled_ns(model, job.shape, job.size))


class _Sample(NamedTuple):
    """Figures of a job after one more run, each the maximum over all ranks."""

    short_of_memory: bool
    seconds: float  # since measuring began
    least_ns: int
    median_ns: int  # the lower median, which omits the first run, a warm-up, of an even number


def _sample(ranks: Ranks, job: Job, run: Callable[[Job], int], runs: list[int], begin: float) -> _Sample:
    """Runs a job on all ranks at once, and adds its nanoseconds to `runs` if there was enough memory.

    Raises ValueError on all ranks after any other error. Collective, so that ranks begin the next run together.
    """
    failure: Exception | None = None
    lacks_memory = False
    try:
        runs.append(run(job))
    except Exception as error:
        lacks_memory = is_short_of_memory(error)
        if not lacks_memory:  # the other ranks wait, and must raise it too
            failure = ValueError(f"Muon: measuring {job} failed: {message_of(error)}")
            failure.__cause__ = error
    times = (min(runs), statistics.median_low(runs)) if runs else (0, 0)
    seconds = time.monotonic() - begin
    any_lacks, seconds, least_ns, median_ns = largest_unless(ranks, failure, [lacks_memory, seconds, *times])
    return _Sample(any_lacks > 0, seconds, int(least_ns), int(median_ns))


def is_short_of_memory(error: Exception) -> bool:
    """True if a batch was too large for the free memory."""
    words = ("out of memory", "can't allocate memory", "not enough memory")  # by CPUs' allocator, and through C++
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def _run(job: Job, group: _C.MuonGroup, compute_dtype: torch.dtype, device: torch.device) -> int:
    num_matrices, *sides = job.shape
    shape = (job.size * num_matrices, *sides)
    master = torch.full(shape, 0.01, dtype=torch.float32, device=device)
    states = [torch.zeros(len(master), *sizes, device=device) for _, sizes in group.state_sizes(sides[0], sides[1])]
    # A pattern, not random numbers, so that the user's generators do not change.
    gradient = torch.arange(master.numel(), dtype=torch.float32, device=device).mul_(0.7).sin_().view(shape)
    packed = torch.empty(shape, dtype=compute_dtype, device=device)
    applies = torch.ones((), dtype=torch.bool, device=device)

    def update() -> None:
        _C.muon_update(master, states[0], gradient, group, applies, others=states[1:])
        packed.copy_(master)

    return device_ns(update, device)


def model_of(device: torch.device) -> str:
    """Returns the name of the cost model that is nearest to the device."""
    if device.type != "cuda":
        return "cpu"
    words = set(torch.cuda.get_device_name(device).lower().replace("-", " ").split())
    names = [name for name in _plan.device_names() if name.split("-")[0] in words]
    return names[0] if names else DEFAULT_DEVICE


def _key(
    ranks: Ranks,
    muon: dict[str, Any],
    compute_dtypes: dict[Shape, torch.dtype],
    device: torch.device,
    tuned: Tuned,
) -> dict[str, Any]:
    """Returns everything that a time depends on besides shape and batch."""
    return {
        "version": VERSION,
        **machine_key(device),
        "ns_dtype": str(muon["ns_dtype"] or _C.default_ns_dtype(device)),
        "ns_coefficients": resolved_coefficients(muon["ns_coefficients"], muon["ns_steps"]),
        "compute_dtypes": sorted({str(dtype) for dtype in compute_dtypes.values()}),
        "nesterov": muon["nesterov"],
        **{key: muon[key] for key in ("rule", "cautious_weight_decay") if key in muon},
        "tuned": tuned.rows(),
        # Ranks of a CPU share its cores.
        "ranks": ranks.size if device.type == "cpu" else 0,
    }


def _cached_times(file: CacheFile) -> dict[Job, int]:
    with contextlib.suppress(Exception):  # after any error the times are measured again
        rows = [row for row in file.rows() if type(row) is list and list(map(type, row)) == [int] * 5]
        return {Job((n, r, c), b): ns for n, r, c, b, ns in rows if 0 < ns <= _DAY_NS}
    return {}


def _store(file: CacheFile, times: dict[Job, int]) -> None:
    """Stores these times beside the cached ones."""

    def rows() -> list[list[int]]:
        return [[*job.shape, job.size, ns] for job, ns in sorted((_cached_times(file) | times).items())]

    if times:
        file.replace(rows, "measured costs")
