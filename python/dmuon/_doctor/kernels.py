"""The section of backends: each one orthogonalises a few shapes, and is compared with the iteration in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dmuon._doctor.child import one_line
from dmuon._doctor.devices import DTYPES, accelerators, choices
from dmuon._doctor.findings import Findings

# Matrices, rows, columns: one entry, odd, small, wide, tall, a batch.
_SHAPES = ((1, 1, 1), (1, 5, 3), (1, 67, 33), (1, 129, 257), (1, 320, 64), (3, 33, 65))
_PANELS = ((1, 2049, 2304),)  # accelerators divide only results of 2048 rows and more
_SLOPE = 30  # rounding of 16 bits grows by less than this, for singular values like these


def kernels(findings: Findings) -> None:
    """Tests all choices that `dmuon tune` could take, on every device."""
    import torch

    from dmuon import _C

    found = accelerators()
    places = {"cpu": [torch.device("cpu")]}
    if found:
        places[str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1].index}"] = found
    device = found[0] if found else torch.device("cuda")  # which says if they are in this build
    findings.fact("CUDA kernels", _C.why_no_cuda_kernels(device) or f"dmuon's own run on {device}")
    for place, devices in places.items():
        cases = [_Case(shape, device) for device in devices for shape in _SHAPES + _PANELS * (place != "cpu")]
        for name, dtype in DTYPES.items():
            try:
                _test(findings, f"{place} {name}", cases, getattr(torch, dtype))
            except Exception as error:
                findings.fail(f"{place} {name}: {one_line(error)}")


class _Case:
    """Gaussian matrices, and what the iteration yields in exact arithmetic."""

    def __init__(self, shape: tuple[int, int, int], device: Any) -> None:
        import torch

        from dmuon._planning.tuning import polynomial
        from dmuon._setup.hyperparameters import NS_COEFFICIENTS, NS_STEPS, resolved_coefficients

        self.rows = resolved_coefficients(NS_COEFFICIENTS, NS_STEPS)
        self.given = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
        # Small matrices on the CPU, so that the reference does not depend on the device.
        self.exact = polynomial(self.given if shape in _PANELS else self.given.cpu(), self.rows)

    def error(self, choice: Any, dtype: Any) -> float:
        """Returns the largest relative error of one of the matrices."""
        from dmuon import _C

        found = _C.orthogonalize(self.given, self.rows, len(self.rows), 0.0, dtype, choice=choice)
        off = (found.to(self.exact) - self.exact).flatten(1).norm(dim=1) / self.exact.flatten(1).norm(dim=1)
        return off.max().item() if off.isfinite().all() else math.inf

    def bound(self, dtype: Any) -> float:
        """Returns the error that rounding alone explains. Each step multiplies the smallest values by at most a."""
        import torch

        unit = float(torch.finfo(dtype).eps) / 2
        return unit * (_SLOPE if dtype.itemsize == 2 else 4 * math.prod(a for a, _, _ in self.rows))


def _test(findings: Findings, name: str, cases: Iterable[_Case], dtype: Any) -> None:
    """Adds a line for each backend that serves the dtype: the largest error, and where it is if it is too large."""
    worst: dict[str, tuple[float, str]] = {}
    bound = 0.0
    for case in cases:
        bound, device = case.bound(dtype), case.given.device
        rows, cols = case.given.shape[1:]
        for choice in choices(rows, cols, device, dtype):
            where = f" on {device}, {choice.form.name.lower()}, {tuple(case.given.shape)}"
            found = case.error(choice, dtype), where
            worst[choice.backend] = max(found, worst.get(choice.backend, found))
    for number, (backend, (error, where)) in enumerate(worst.items()):
        words = f"error {error:.1e} of at most {bound:.1e}{where if error > bound else ''}"
        findings.check(f"{name} {backend}{' (default)' if number == 0 else ''}", error <= bound, words)
