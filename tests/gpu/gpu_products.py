"""Products of each backend beside ATen's: bits, errors against fp64, rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import gpu_others
import torch
from dmuon._planning.elementwise import FULL, FUSED
from gpu_device import Device
from gpu_part import Findings
from torch import Tensor

from dmuon import _C

SHAPES = (
    (1, 1024, 1024),
    (16, 1024, 1024),
    (16, 512, 3584),
    (1, 2048, 2048),
    (1, 2048, 11008),
    (1, 3584, 3584),
    (1, 3584, 18944),
    (1, 8192, 8192),
    (1, 8192, 28672),
)
SCALE = 32  # extents are divided by it where there is no hardware
IN_BF16 = SHAPES[2:5]
MEAN, MOST = 1.05, 2.0  # times ATen's mean and largest error
PAST_CACHES = 128 << 20  # bytes that calls take turns with
COEFFICIENTS = _C.resolve_coefficients("polar_express", 5)


def backends(m: int, n: int, where: torch.device, dtype: torch.dtype) -> dict[str, int]:
    """Panel rows of each backend's first candidate, by its name. The default comes first.

    FULL stands for FUSED too, whose products are the same.
    """
    found: dict[str, int] = {}
    for one in _C.candidates(m, n, COEFFICIENTS, len(COEFFICIENTS), where, dtype):
        if one.backend != FUSED:
            found.setdefault(one.backend, one.panel_rows)
    return found


class Product(NamedTuple):
    """alpha a b + beta c: X X', X' X, or b R + c R R; and Q X and X Q, which are full products."""

    name: str
    beta: float
    c: Tensor | None
    alpha: float
    a: Tensor
    b: Tensor
    full: bool = False

    def by(self, backend: str, panel_rows: int, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = self.a.new_empty(*self.a.shape[:-1], self.b.shape[-1])
        c = out if self.c is None else self.c
        if self.full:
            _C.product(backend, out, self.beta, c, self.alpha, self.a, self.b)
            return out
        _C.symmetric_product(backend, panel_rows, out, self.beta, c, self.alpha, self.a, self.b)
        return out

    def exactly(self, host: bool) -> Tensor:
        a, b = (x.double().cpu() if host else x.double() for x in (self.a, self.b))
        product = self.alpha * (a @ b)
        if self.c is not None:
            product += self.beta * self.c.double().to(product.device)
        return product

    def alone(self, index: int) -> Product:
        c = None if self.c is None else self.c[index : index + 1]
        return self._replace(c=c, a=self.a[index : index + 1], b=self.b[index : index + 1])


def products_of(x: Tensor, backend: str, panel_rows: int) -> list[Product]:
    """The products of a step, and of one of a tall X. R is of the backend, because addends are symmetric."""
    gram, tall = Product("X X'", 0.0, None, 1.0, x, x.mT), x.mT.contiguous()
    r = gram.by(backend, panel_rows)
    return [
        gram,
        Product("R R", -0.75, r, 0.5, r, r),
        Product("X' X", 0.0, None, 1.0, tall.mT, tall),
        Product("Q X", 2.0, x, 0.5, r, x, True),
        Product("X Q", 2.0, tall, 0.5, tall, r.mT, True),
    ]


def computes(backend: str, product: Product) -> bool:
    """True if the backend computes such products otherwise than the backends before it."""
    return backend == "aten" or (backend == FULL) == product.full


def random(shape: tuple[int, ...], where: torch.device) -> Tensor:
    """The same numbers at every call; on a GPU by its generator, because the host's takes seconds for large tensors."""
    at = where if where.type == "cuda" else torch.device("cpu")
    return torch.randn(shape, generator=torch.Generator(at).manual_seed(0), device=at).to(where)


def rows_of_one(shape: tuple[int, ...], where: torch.device, dtype: torch.dtype) -> Tensor:
    """Rows of length 1, so that R has ones on its diagonal."""
    return random(shape, where).div_(shape[-1] ** 0.5).to(dtype)


def scaled(device: Device, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """A shape of this device; extents stay multiples of 8, as the iteration pads them."""
    b, m, n = shape
    return shape if device.is_real else (min(b, 3), max(8, m // SCALE), max(8, n // SCALE))


def check_products(device: Device, findings: Findings, where: torch.device) -> None:
    """Bits: symmetric, equal from run to run, equal alone and in a batch. Errors: beside ATen's."""
    for shape in SHAPES:
        for dtype in (torch.float16, torch.bfloat16) if shape in IN_BF16 else (torch.float16,):
            b, m, n = scaled(device, shape)
            x = rows_of_one((b, m, n), where, dtype)
            known = backends(m, n, where, dtype)
            for backend in [name for name in known if name != "aten"]:
                for product in filter(partial(computes, backend), products_of(x, backend, known[backend])):
                    name = f"{backend} {product.name} {b}x{m}x{n} {str(dtype)[6:]}"
                    _check(device, findings, name, product, lambda p, k=backend, r=known[backend]: p.by(k, r))


def _check(device: Device, findings: Findings, name: str, product: Product, run: Callable[[Product], Tensor]) -> None:
    got = run(product)
    bits = {"from run to run": torch.equal(run(product), got)}
    if not product.full:
        bits = {"symmetric": torch.equal(got, got.mT), **bits}
    if len(got) > 1:
        bits["alone and in a batch"] = torch.equal(run(product.alone(len(got) - 1))[0], got[-1])
    check_bits(findings, name, bits)
    check_errors(findings, name, (got, product.by("aten", 0)), product.exactly(host=not device.is_real), (MEAN, MOST))


def check_bits(findings: Findings, name: str, bits: dict[str, bool]) -> None:
    different = [which for which, equal in bits.items() if not equal]
    findings.check(
        f"{name}: bits are equal, {', '.join(bits)}", not different, f"not {different}" if different else "yes"
    )


def check_errors(
    findings: Findings, name: str, found: tuple[Tensor, Tensor], exact: Tensor, bounds: tuple[float, float]
) -> None:
    """Compares the mean and the largest error with ATen's, the second one."""
    ours, atens = ((one.double().to(exact.device) - exact).abs_() for one in found)
    mean, most = float(ours.mean() / atens.mean()), float(ours.max() / atens.max())
    claim = f"{name}: mean and largest error are at most {bounds[0]} and {bounds[1]} of ATen's"
    findings.check(claim, mean <= bounds[0] and most <= bounds[1], f"{mean:.3f} {most:.3f}")


def peak_flops(device: Device, where: torch.device) -> float:
    """FLOPs a second of ATen's large products in fp16: the best of some."""
    best = 0.0
    for side in (4096, 6144, 8192):
        a = rows_of_one((side, side), where, torch.float16)
        out = torch.empty_like(a)
        best = max(
            best, 2 * side**3 / device.times({"mm": lambda _, a=a, out=out: torch.mm(a, a, out=out)})["mm"].device
        )
    return best


def time_products(device: Device, findings: Findings, where: torch.device, peak: float) -> None:
    """FLOPs of symmetric products count a triangle, m (m + 1) inner, whatever a backend computes."""
    for shape in SHAPES:
        for dtype in (torch.float16, torch.bfloat16) if shape == SHAPES[4] else (torch.float16,):
            b, m, n = shape
            known = backends(m, n, where, dtype)
            size = 2 * b * m * (2 * n + 2 * m)
            sets = [rows_of_one(shape, where, dtype) for _ in range(max(1, min(16, PAST_CACHES // size)))]
            for products in zip(*(products_of(x, *list(known.items())[-1]) for x in sets), strict=True):
                who = {name: rows for name, rows in known.items() if computes(name, products[0])}
                _time(device, findings, products, who, peak)


def _baddbmm(product: Product, out: Tensor) -> Tensor:
    return torch.baddbmm(product.c, product.a, product.b, beta=product.beta, alpha=product.alpha, out=out)


def _time(device: Device, findings: Findings, products: Sequence[Product], known: dict[str, int], peak: float) -> None:
    outs = [product.by("aten", 0) for product in products]

    def by(backend: str, panel_rows: int) -> Callable[[int], Any]:
        return lambda i: products[i % len(products)].by(backend, panel_rows, outs[i % len(outs)])

    calls: dict[str, Callable[[int], Any]] = {name: by(name, panel_rows) for name, panel_rows in known.items()}
    if products[0].c is None or products[0].full:  # without c: the least that Q X could take
        calls["bmm"] = lambda i: torch.bmm(
            products[i % len(outs)].a, products[i % len(outs)].b, out=outs[i % len(outs)]
        )
    if products[0].full:
        calls["baddbmm"] = lambda i: _baddbmm(products[i % len(outs)], outs[i % len(outs)])
    elif not gpu_others.why_not():
        calls["quack"] = lambda i: gpu_others.product(products[i % len(outs)], outs[i % len(outs)])
    b, m, inner = products[0].a.shape
    flops = b * m * inner * (2 * outs[0].shape[-1] if products[0].full else m + 1)
    times = device.times(calls)
    for name, took in times.items():
        findings.figure(
            product=f"{products[0].name} {b}x{m}x{inner} {str(outs[0].dtype)[6:]}",
            by=name,
            us=1e6 * took.device,
            host_us=1e6 * took.host,
            tflops=flops / took.device / 1e12,
            part_of_peak=flops / took.device / peak,
            x_aten=took.device / times["aten"].device,
        )
