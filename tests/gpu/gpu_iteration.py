"""Newton-Schulz by the candidates: accuracy at edges, and the fastest exact one beside the best of ATen's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_others
import torch
from dmuon._planning.choices import Setting
from dmuon._planning.elementwise import FUSED
from dmuon._planning.tuning import _errors, _is_exact
from dmuon._setup.hyperparameters import plain_choice
from gpu_device import Device
from gpu_part import Findings
from gpu_products import COEFFICIENTS, PAST_CACHES, random, scaled
from torch import Tensor

from dmuon import _C

SHAPES = (
    (16, 512, 3584),
    (16, 1024, 1024),
    (1, 1024, 1024),
    (1, 2048, 2048),
    (1, 2048, 11008),
    (1, 3584, 3584),
    (1, 3584, 18944),
    (1, 18944, 3584),
    (1, 4096, 14336),
    (1, 8192, 8192),
    (1, 8192, 28672),
)
ODD = ((3, 1152, 4304), (2, 127, 131), (2, 1, 67), (2, 67, 1))
SCALES = (1e-30, 1e30)
MOST = 1.16  # of a singular value: the polynomial's range, and rounding
EXACT_FLOPS = 1 << 33  # of a product: errors of larger matrices are those of smaller ones of the same form


def iterate(x: Tensor, choice: _C.Choice | None, dtype: torch.dtype = torch.float16) -> Tensor:
    y: Tensor = _C.orthogonalize(x, COEFFICIENTS, len(COEFFICIENTS), 0.0, dtype, choice=choice)
    return y


def by_form(rows: int, cols: int, where: torch.device, dtype: torch.dtype = torch.float16) -> dict[str, _C.Choice]:
    """The first candidate of each backend and form."""
    found: dict[str, _C.Choice] = {}
    for one in _C.candidates(rows, cols, COEFFICIENTS, len(COEFFICIENTS), where, dtype):
        if one.backend != FUSED:  # whose iteration is FULL's
            found.setdefault(f"{one.backend} {one.form.name.lower()}", one)
    return found


def check_iteration(device: Device, findings: Findings, where: torch.device) -> None:
    """In fp16, by every backend and form."""
    from exact import conditioned, gaussian

    m, n = (512, 2048) if device.is_real else (48, 192)
    cases = (
        ("rectangular", gaussian(m, n), 4e-3),
        ("square", gaussian(m, m), 2e-2),
        ("condition 1e3", conditioned(m, n, 1e3), 6e-2),
    )
    for what, case, bound in cases:
        bound *= 1 if device.is_real else 2.5  # small matrices have larger errors
        right = case.polynomial(COEFFICIENTS)
        x = case.x.float().to(where)
        kept = case.s / case.s.norm() >= 1.2e-3
        for name, choice in by_form(*x.shape, where).items():
            y = iterate(x, choice).cpu().double()
            error = float((y - right).norm() / right.norm())
            values = (case.u * (y @ case.v)).sum(0)[kept]
            least, most = float(values.min()), float(values.max())
            findings.figure(matrix=f"{what} {m}x{n}", by=name, error=error, least=least, largest=most)
            findings.check(f"{name}, {what}: error <= {bound}", error <= bound, error)
            in_range = least >= 0.83 and most <= 1.14
            findings.check(f"{name}, {what}: singular values in [0.83, 1.14]", in_range, f"{least:.3f} {most:.3f}")
    _check_hard(findings, where, m, n)
    _check_edges(device, findings, where)


def _check_hard(findings: Findings, where: torch.device, m: int, n: int) -> None:
    from exact import hard_spectra, with_singular_values

    for index, spectrum in enumerate(hard_spectra(m)):
        x = with_singular_values(m, n, spectrum).x.float().to(where)
        for name, choice in by_form(m, n, where).items():
            y = iterate(x, choice).cpu().double()
            largest = float(torch.linalg.eigvalsh(y @ y.mT)[-1]) ** 0.5 if y.isfinite().all() else float("inf")
            claim = f"{name}, {('condition 1e7', 'rank 10', 'two large values')[index]}: finite, norm <= {MOST}"
            findings.check(claim, largest <= MOST, largest)


def _check_edges(device: Device, findings: Findings, where: torch.device) -> None:
    """Scales, zeros, odd sizes, and more than 2^31 entries."""
    from exact import rounding_bound

    for shape in ODD:
        b, m, n = shape if device.is_real or max(shape) < 1000 else scaled(device, shape)
        x = torch.randn(b, m, n, generator=torch.Generator().manual_seed(0))
        exact = _exactly(x.to("cuda" if device.is_real else "cpu"))
        bound = rounding_bound(COEFFICIENTS, torch.float16)
        for name, choice in by_form(m, n, where).items():
            errors = [_error(iterate((scale * x).to(where), choice), exact) for scale in (1.0, *SCALES)]
            claim = f"{name} {b}x{m}x{n}: error <= {bound:.3g}, also times {SCALES[0]} and {SCALES[1]}"
            findings.check(claim, max(errors) <= bound, max(errors))
            zeros = iterate(torch.zeros(b, m, n, device=where), choice)
            findings.check(f"{name} {b}x{m}x{n}: zero stays zero", not zeros.any().item(), "")
    if device.is_real:
        _check_many(findings, where)


def _check_many(findings: Findings, where: torch.device) -> None:
    """The last matrix of many is as alone, but for rounding: ATen's products of a batch have bits of their own."""
    m, n = 1152, 4304
    number = 2**31 // (m * n) + 2
    if torch.cuda.mem_get_info()[0] < 20 * number * m * n:
        return findings.leave_out("batches of more than 2^31 entries: there is no memory of 43 GB")
    x = random((number, m, n), where)
    for name, choice in by_form(m, n, where).items():
        if choice.batched:
            many, alone = iterate(x, choice)[-1], iterate(x[-1:].clone(), choice)[0]
            off = _error(many, alone.double())
            findings.check(f"{name}: the last of {number} matrices {m}x{n} is as alone", off <= 2e-3, off)


def _exactly(x: Tensor) -> Tensor:
    from exact import textbook

    return torch.stack([textbook(one, COEFFICIENTS, torch.float64) for one in x.double()])


def _error(y: Tensor, exact: Tensor) -> float:
    return float((y.to(exact.device).double() - exact).norm() / exact.norm())


def time_iteration(device: Device, findings: Findings, where: torch.device, peak: float) -> None:
    """Figures of the default, of ATen's fastest exact candidate, and of the fastest one of all ("tuned")."""
    for shape in SHAPES:
        _time(device, findings, shape, Setting(where, torch.float16, COEFFICIENTS), peak)
        torch.get_device_module(where).empty_cache()


def _time(device: Device, findings: Findings, shape: tuple[int, int, int], setting: Setting, peak: float) -> None:
    b, rows, cols = shape
    number = max(1, min(8, PAST_CACHES // (4 * b * rows * cols)))
    batches = random((number, *shape), setting.device)

    def call(choice: _C.Choice) -> Callable[[int], Any]:
        return lambda index: iterate(batches[index % number], choice, setting.ns_dtype)

    candidates = [one for one in setting.candidates(rows, cols) if one.backend != FUSED]
    looks = {one: device.times({"": call(one)}, rounds=3)[""].device for one in candidates if one.batched or b == 1}
    for one, seconds in looks.items():
        findings.figure(
            candidate=f"{b}x{rows}x{cols}", choice=" ".join(map(str, plain_choice(one)[:4])), ms=1e3 * seconds
        )
    chosen = {"default": candidates[0]}
    for role, backends in (("ATen's best", ("aten",)), ("tuned", None)):
        of = [one for one in looks if backends is None or one.backend in backends]
        chosen[role] = _fastest_exact(sorted(of, key=looks.__getitem__), shape, setting)
    calls = {role: call(one) for role, one in chosen.items()}
    if not gpu_others.why_not():
        calls["Dao-AILab's"] = lambda index: gpu_others.newton_schulz()(batches[index % number])
    times = device.times(calls)
    m, n = sorted((rows, cols))
    floor = b * min(15 * m * m * n + 5 * m**3, 6 * m * m * n + 14 * m**3) / peak
    for role, took in times.items():
        findings.figure(
            newton_schulz="x".join(map(str, shape)),
            which=role,
            choice=" ".join(map(str, plain_choice(chosen[role])[:4])) if role in chosen else "",
            ms=1e3 * took.device,
            host_ms=1e3 * took.host,
            x_aten=took.device / times["ATen's best"].device,
            of_floor=floor / took.device,
        )


def _fastest_exact(ordered: list[_C.Choice], shape: tuple[int, int, int], setting: Setting) -> _C.Choice:
    """The first choice that `dmuon tune` takes for exact, by the errors of smaller matrices of the same form."""
    _, rows, cols = shape
    factor = 1
    while rows * cols * min(rows, cols) // factor**3 > EXACT_FLOPS:
        factor *= 2

    known = setting.candidates(rows // factor, cols // factor)

    def smaller(one: _C.Choice) -> _C.Choice | None:
        """None if there is no such form. Below 2048 rows ATen has no panels: there the full product stands for them."""
        like = [each for each in known if plain_choice(each)[:3] == plain_choice(one)[:3]]
        return next((each for each in like if each.panel_rows == one.panel_rows), like[0] if like else None)

    direct = [each for each in known if each.form == _C.Form.DIRECT]
    for one in ordered:
        like = smaller(one)
        if like is None:
            continue
        errors = _errors(rows // factor, cols // factor, setting, list(dict.fromkeys([like, *direct])))
        if _is_exact(like, errors, setting):
            return one
    raise AssertionError("no candidate is exact")
