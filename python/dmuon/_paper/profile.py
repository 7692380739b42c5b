"""The profile of the authors' engine: its constants with their origin, and formulas from sizes to milliseconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from dmuon._paper.table import GPUS_A_NODE
from dmuon._paper.workload import Shape, Workload

PUBLIC = "Wall-OSS, Pi0 and Qwen2.5-7B"
ENDS = f"the 8- and 256-GPU rows of {PUBLIC}"
ALL_PUBLIC = f"all 18 rows of {PUBLIC}"


class Origin(NamedTuple):
    """Unit and source of a constant."""

    unit: str
    basis: str  # "measured", "fitted" or "inferred"
    source: str


@dataclasses.dataclass(frozen=True)
class Profile:
    """Constants of an engine on A800s. `ORIGINS` has the origin of each."""

    symmetric_tflops: float = 217
    product_tflops: float = 195
    library_tflops: float = 228
    matrix_ms: float = 0.199
    element_ms: float = 0.111
    fixed_ms: float = 3.07
    unbatched_ms: float = 1.0
    credit_ms: float = 10.89
    vanilla_element_ms: float = 0.1458
    vanilla_matrix_ms: float = 1.066
    vanilla_latency_ms: float = 0.002814
    vanilla_network_ms: float = 0.00048
    tensor_ms: float = 0.4185


_TIMINGS = "timings of 13 shapes on A800 in X-Square-Robot/dmuon, docs/internal/syrk_benchmark.md, table 2"
_RATE = f"{_TIMINGS}; one figure for all shapes, residuals up to 9 %"
_BY_SEARCH = f"random search on {ALL_PUBLIC}: fewest rows beyond 15 %, then least squares"
_LEAST_SQUARES = f"least squares of relative errors on {ENDS}"

ORIGINS = {
    "symmetric_tflops": Origin("TFLOP/s of symmetric products, a triangle counted", "measured", _RATE),
    "product_tflops": Origin("TFLOP/s of other products", "measured", _RATE),
    "library_tflops": Origin("TFLOP/s of cuBLAS", "measured", _RATE),
    "matrix_ms": Origin("ms a matrix", "fitted", _BY_SEARCH),
    "element_ms": Origin("ms a million elements", "fitted", _BY_SEARCH),
    "fixed_ms": Origin("ms a step", "fitted", _BY_SEARCH),
    "unbatched_ms": Origin("ms a matrix without batches", "measured", _RATE),
    "credit_ms": Origin(
        "ms a billion parameters on 8 ranks", "fitted", f"least squares of AdamW's step + optimizer - step on {ENDS}"
    ),
    "vanilla_element_ms": Origin("ms a million elements", "fitted", _LEAST_SQUARES),
    "vanilla_matrix_ms": Origin("ms a matrix", "fitted", _LEAST_SQUARES),
    "vanilla_latency_ms": Origin("ms a rank beyond 8 and matrix", "fitted", _LEAST_SQUARES),
    "vanilla_network_ms": Origin("ms a million elements on several nodes", "fitted", _LEAST_SQUARES),
    "tensor_ms": Origin("ms a parameter tensor", "fitted", f"{_LEAST_SQUARES}, after the other four"),
}

PAPER = Profile()

# The three constants of DMuon's optimizer time without the 12 middle rows: a figure held out of the fit.
ENDS_ONLY = dataclasses.replace(PAPER, matrix_ms=0.2987, element_ms=0.0922, fixed_ms=3.029)


def _ms(flops: float, tflops: float) -> float:
    return flops / (tflops * 1e9)


def orthogonalisation_ms(profile: Profile, shape: Shape) -> float:
    """Returns the time of five steps in two segments (flops/newton_schulz.h), symmetric products as triangles."""
    m, n = shape
    return _ms(2 * m * m * n + 14 * m**3, profile.symmetric_tflops) + _ms(4 * m * m * n, profile.product_tflops)


def full_orthogonalisation_ms(profile: Profile, shape: Shape) -> float:
    """Returns the time with full products alone, in the cheaper of two segments and the direct form."""
    m, n = shape
    return _ms(min(8 * m * m * n + 28 * m**3, standard_flops(shape)), profile.product_tflops)


def standard_flops(shape: Shape) -> float:
    """Returns the FLOPs of five steps as torch.optim.Muon takes them: full products, direct form."""
    m, n = shape
    return 20 * m * m * n + 10 * m**3


def update_ms(profile: Profile, shape: Shape) -> float:
    """Returns an owner's time for one matrix of a batch."""
    return orthogonalisation_ms(profile, shape) + around_ms(profile, shape)


def around_ms(profile: Profile, shape: Shape) -> float:
    """Returns the part of an owner's time that is not products."""
    return profile.matrix_ms + profile.element_ms * shape.millions


def dmuon_step_ms(profile: Profile, workload: Workload, gpus: int, optim_ms: float, adamw_step_ms: float) -> float:
    """Returns AdamW's step with the optimizer time added, less AdamW's own time for its share of the parameters."""
    return adamw_step_ms + optim_ms - profile.credit_ms * workload.billions * GPUS_A_NODE / gpus


def vanilla_optim_ms(profile: Profile, workload: Workload, gpus: int) -> float:
    """Returns the time of gathering all gradients and orthogonalising all matrices on every rank."""
    shapes = workload.shapes()
    return library_ms(profile, shapes) + gather_ms(profile, workload, gpus, shapes)


def library_ms(profile: Profile, shapes: Iterable[Shape]) -> float:
    """Returns the time of all matrices' iterations by a library's full products."""
    return sum(_ms(standard_flops(shape), profile.library_tflops) for shape in shapes)


def gather_ms(profile: Profile, workload: Workload, gpus: int, shapes: list[Shape]) -> float:
    """Returns the part of vanilla's time that is not products: a gather a matrix, and passes over the elements."""
    millions = sum(shape.millions for shape in shapes)
    latency = profile.vanilla_latency_ms * workload.gather_latency_factor * (gpus - GPUS_A_NODE)
    between_nodes = profile.vanilla_network_ms if gpus > GPUS_A_NODE else 0.0
    return (profile.vanilla_element_ms + between_nodes) * millions + (profile.vanilla_matrix_ms + latency) * len(shapes)


def vanilla_step_ms(profile: Profile, workload: Workload, optim_ms: float, adamw_step_ms: float) -> float:
    """Returns AdamW's step with the optimizer time added, less a time for each parameter tensor."""
    return adamw_step_ms + optim_ms - profile.tensor_ms * workload.tensors
