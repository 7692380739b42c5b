"""What the owner path takes, c[s,b]: measured on the ranks that will train, kept, loaded or modelled."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

import dmuon
from dmuon import _C, ranks
from dmuon.hyperparameters import native_group

logger = logging.getLogger("dmuon")

BUDGET_S = 10.0  # of measuring, on all ranks together
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 15
_LONGEST_SHARE = 0.05  # of the budget, for a single batch; what takes longer is scaled from smaller ones

_FAILED = 10**17  # nanoseconds, three years

Shape = tuple[int, int]


class Job(NamedTuple):
    """One batch to be measured."""

    shape: Shape
    size: int


def loaded_costs(path: str | os.PathLike[str], function: str) -> _C.CostTable:
    """A JSON table.

    Args:
        path: of it.
        function: whose argument `costs` this is.

    Raises:
        ValueError: the table cannot be read.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ValueError(f"{function}: costs: cannot read the table: {error}") from error
    return _C.CostTable.from_json(text)


def modelled_costs(shapes: dict[Shape, int], model: str) -> _C.CostTable:
    """The costs that a model of a device gives.

    Args:
        shapes: (rows, cols) and how many matrices there are.
        model: a device's name, as `dmuon models` lists them.
    """
    entries = [
        (shape, [(size, _C.modelled_ns(model, *shape, size)) for size in _C.candidate_batches(*shape, number)])
        for shape, number in shapes.items()
    ]
    return _C.CostTable(f"model of {model}", entries)


def measured_costs(
    place: ranks.Ranks,
    shapes: dict[Shape, int],
    muon: dict[str, Any],
    compute_dtypes: dict[Shape, torch.dtype],
    device: torch.device,
) -> _C.CostTable:
    """The costs on these ranks: those that slot 0 has kept, the others measured. Collective; alike on all ranks.

    Args:
        place: this rank.
        shapes: (rows, cols) and how many matrices there are.
        muon: Muon's hyperparameters.
        compute_dtypes: what updated weights are cast to.
        device: where the owner path runs.
    """
    jobs = [Job(shape, size) for shape, number in shapes.items() for size in _C.candidate_batches(*shape, number)]
    kept = _Kept(_key(place, muon, compute_dtypes, device))
    times = dict(ranks.from_first(place, lambda: [(job, kept.times[job]) for job in jobs if job in kept.times]))
    missing = [job for job in jobs if job not in times]
    if missing:
        times |= measure(place, missing, muon, compute_dtypes, device)
        if place.slot == 0:
            kept.add(times)
    found = [(shape, [(job.size, times[job]) for job in jobs if job.shape == shape]) for shape in shapes]
    return _C.CostTable(f"measured on {_device_name(device)}, {place.size} ranks at once", found)


def measure(
    place: ranks.Ranks,
    jobs: list[Job],
    muon: dict[str, Any],
    compute_dtypes: dict[Shape, torch.dtype],
    device: torch.device,
    budget_s: float = BUDGET_S,
) -> dict[Job, int]:
    """Nanoseconds of each job: the median over rounds, the maximum over ranks. Collective.

    All ranks run the same job at the same time, as they will share the machine in training. Rounds go through all
    jobs, so that a disturbance meets all of them; they end with the budget, after three at least. A job whose single
    run would take a twentieth of the budget is not run but scaled by the device's model from the largest that was.
    """
    group = native_group(muon, device)
    samples: dict[Job, list[int]] = {job: [] for job in jobs}
    begin = time.monotonic()
    with _progress(place, len(jobs)) as advance:
        skipped = _first_round(place, jobs, group, compute_dtypes, device, samples, budget_s, advance)
        for number in range(1, _MOST_ROUNDS):
            for job in jobs:
                if job not in skipped:
                    samples[job].append(_sample(place, job, group, compute_dtypes[job.shape], device))
            spent = time.monotonic() - begin
            if number + 1 >= _LEAST_ROUNDS and max(ranks.all_gather(place, spent)) > budget_s:
                break
    if device.type == "cuda":
        torch.cuda.empty_cache()  # large batches may have come from no other use
    mine = [int(statistics.median(samples[job])) if job not in skipped else 0 for job in jobs]
    slowest = [max(column) for column in zip(*ranks.all_gather(place, mine), strict=True)]
    times = {job: ns for job, ns in zip(jobs, slowest, strict=True) if job not in skipped}
    return times | {job: _scaled(job, times, device) for job in skipped}


def _first_round(
    place: ranks.Ranks,
    jobs: list[Job],
    group: _C.MuonGroup,
    compute_dtypes: dict[Shape, torch.dtype],
    device: torch.device,
    samples: dict[Job, list[int]],
    budget_s: float,
    advance: Any,
) -> set[Job]:
    """Runs small jobs first; what a smaller one shows to take too long is skipped. The first run warms up."""
    model = model_of(device)
    skipped: set[Job] = set()
    too_long = False
    for job in sorted(jobs, key=lambda job: (_C.modelled_ns(model, job.shape[0], job.shape[1], job.size), job)):
        if too_long:
            skipped.add(job)
            continue
        _sample(place, job, group, compute_dtypes[job.shape], device)
        ns = _sample(place, job, group, compute_dtypes[job.shape], device)
        samples[job].append(ns)
        advance()
        slowest = max(ranks.all_gather(place, ns))
        too_long = slowest > budget_s * _LONGEST_SHARE * 1e9
        if slowest >= _FAILED:
            skipped.add(job)
    return skipped


def _sample(place: ranks.Ranks, job: Job, group: _C.MuonGroup, compute_dtype: torch.dtype, device: torch.device) -> int:
    """One run of the owner path on all ranks at once, in nanoseconds on this one; _FAILED where memory is short."""
    ranks.all_gather(place, 0)
    try:
        return _run(job, group, compute_dtype, device)
    except RuntimeError as error:
        logger.info("dmuon: a batch of %s could not be measured: %s", job, error)
        return _FAILED


def _run(job: Job, group: _C.MuonGroup, compute_dtype: torch.dtype, device: torch.device) -> int:
    shape = (job.size, *job.shape)
    master = torch.full(shape, 0.01, dtype=torch.float32, device=device)
    momentum = torch.zeros_like(master)
    # A pattern, not random numbers: the user's generators stay untouched.
    gradient = torch.arange(master.numel(), dtype=torch.float32, device=device).mul_(0.7).sin_().view(shape)
    packed = torch.empty(shape, dtype=compute_dtype, device=device)
    _synchronize(device)
    begin = time.perf_counter_ns()
    _C.muon_update(master, momentum, gradient, group)
    packed.copy_(master)
    _synchronize(device)
    return time.perf_counter_ns() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _scaled(job: Job, times: dict[Job, int], device: torch.device) -> int:
    """The model's time, times what the longest measured job took over its own."""
    model = model_of(device)
    ratio = 1.0
    if times:
        longest = max(times, key=lambda other: times[other])
        ratio = times[longest] / max(1, _C.modelled_ns(model, *longest.shape, longest.size))
    return int(_C.modelled_ns(model, *job.shape, job.size) * ratio)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor()


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def model_of(device: torch.device) -> str:
    """The cost model nearest to the device."""
    if device.type != "cuda":
        return "cpu"
    words = set(torch.cuda.get_device_name(device).lower().replace("-", " ").split())
    names = [name for name in _C.device_names() if name.split("-")[0] in words]
    return names[0] if names else "a100-sxm4-80gb"


def _key(
    place: ranks.Ranks, muon: dict[str, Any], compute_dtypes: dict[Shape, torch.dtype], device: torch.device
) -> dict[str, Any]:
    """All that a time depends on besides shape and batch."""
    rows = _C.resolve_coefficients(muon["ns_coefficients"], muon["ns_steps"])
    return {
        "device": _device_name(device),
        "dmuon": dmuon.__version__,
        "torch": torch.__version__,
        "ns_dtype": str(muon["ns_dtype"] or _C.default_ns_dtype(device)),
        "ns_coefficients": rows,
        "compute_dtypes": sorted({str(dtype) for dtype in compute_dtypes.values()}),
        "nesterov": muon["nesterov"],
        # Ranks of a CPU share its cores.
        "ranks": place.size if device.type == "cpu" else 0,
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
    }


class _Kept:
    """Times measured before, in a file of the user's cache; DMUON_CACHE_DIR names another folder, "" none."""

    def __init__(self, key: dict[str, Any]) -> None:
        self._key = json.loads(json.dumps(key))
        self.times: dict[Job, int] = {}
        home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
        folder = os.environ.get("DMUON_CACHE_DIR", str(Path(home) / "dmuon"))
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self._path = Path(folder) / "costs" / f"{digest}.json" if folder else None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # what cannot be read is measured again
            self._load()

    def _load(self) -> None:
        if self._path is None:
            return
        kept = json.loads(self._path.read_text())
        if kept["key"] == self._key:
            self.times = {Job((int(r), int(c)), int(b)): int(ns) for r, c, b, ns in kept["times"] if int(ns) >= 0}

    def add(self, times: dict[Job, int]) -> None:
        """Keeps what is known now; whole or not at all."""
        if self._path is None:
            return
        self.times |= times
        rows = [[*job.shape, job.size, ns] for job, ns in sorted(self.times.items())]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                json.dump({"key": self._key, "times": rows}, file)
            os.replace(file.name, self._path)
        except OSError as error:
            logger.warning("dmuon: the measured costs were not kept: %s", error)


@contextlib.contextmanager
def _progress(place: ranks.Ranks, num_jobs: int) -> Iterator[Any]:
    """A bar at slot 0, once it has taken a second."""
    quiet = place.slot != 0
    with tqdm(total=num_jobs, desc="dmuon measures batches", leave=False, delay=1.0, disable=quiet) as bar:
        yield bar.update
