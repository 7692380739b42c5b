"""Updates element by element, by each of `_C.elementwise`: bits, errors against fp64, rates."""

from __future__ import annotations

import torch
from dmuon._planning.choices import Setting
from dmuon._planning.elementwise import FULL, FUSED, _Update
from dmuon._setup.hyperparameters import choice_of, plain_choice
from gpu_device import Device
from gpu_part import Findings
from gpu_products import COEFFICIENTS, MEAN, MOST, PAST_CACHES, check_bits, check_errors, random, scaled
from torch import Tensor

from dmuon import _C

SHAPES = (
    (1, 1024, 1024),
    (16, 1024, 1024),
    (16, 512, 3584),
    (1, 2048, 2048),
    (1, 2048, 11008),
    (1, 2048, 11005),
    (1, 3584, 18944),
    (1, 8192, 28672),
)
CHECKED = (*SHAPES[1:4], SHAPES[5])
LR, DECAY, MOMENTUM = 1.0, 0.1, 0.95
BYTES = 24  # an element: momentum in and out, gradient, weights in and out, and the update in 16 bits, twice


def group_by(name: str, sides: tuple[int, int], dtype: torch.dtype) -> _C.MuonGroup:
    """Without a step of the iteration: the update is the normalised direction."""
    where = _C.Choice("aten", _C.Form.DIRECT, True, 0, name)
    return _C.MuonGroup(
        lr=LR,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        nesterov=True,
        coefficients=[],
        eps=_C.EPS,
        adjust_lr_fn="original",
        ns_dtype=dtype,
        choices={sides: where},
    )


def train(name: str, gradients: Tensor, weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights and momentum after an update by each gradient. The scale of X is guessed from the second one on."""
    w, m = weights.clone(), torch.zeros_like(weights)
    words = _C.memo_words(w.device)
    memo = w.new_zeros(len(w), 1, words) if words else None
    applies = torch.ones((), dtype=torch.bool, device=w.device)
    group = group_by(name, (w.shape[-2], w.shape[-1]), dtype)
    for gradient in gradients:
        _C.muon_update(w, m, gradient, group, applies, memo=memo)
    return w, m


def exactly(gradients: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    w, m = weights.double(), torch.zeros_like(weights, dtype=torch.float64)
    factor = LR * max(1.0, w.shape[-2] / w.shape[-1]) ** 0.5
    for gradient in gradients.double():
        m.lerp_(gradient, 1 - MOMENTUM)
        direction = gradient.lerp(m, MOMENTUM)
        direction /= torch.linalg.matrix_norm(direction, keepdim=True)
        w.mul_(1 - LR * DECAY).sub_(direction, alpha=factor)
    return w, m


def check_updates(device: Device, findings: Findings, where: torch.device) -> None:
    """Bits, and errors beside ATen's, of three updates; the third gradient is 1000 times as large: a wrong guess."""
    for shape in CHECKED:
        for dtype in (torch.float16, torch.bfloat16):
            b, m, n = scaled(device, shape)
            n -= 3 * (shape[2] % 8 != n % 8)
            weights, *gradients_ = random((4, b, m, n), where)
            gradients, weights = torch.stack(gradients_), weights / (m * n) ** 0.5
            gradients[2] *= 1000
            host = "cuda" if device.is_real else "cpu"  # the emulated device computes on the CPU anyway
            exact = exactly(gradients.to(host), weights.to(host))
            aten = train("aten", gradients, weights, dtype)
            for name in set(_C.elementwise(where, dtype)) - {"aten"}:
                what = f"{name} update {b}x{m}x{n} {str(dtype)[6:]}"
                got = train(name, gradients, weights, dtype)
                again, alone = (
                    train(name, gradients, weights, dtype),
                    train(name, gradients[:, -1:], weights[-1:], dtype),
                )
                bits = {
                    "from run to run": all(map(torch.equal, got, again)),
                    "alone and in a batch": all(torch.equal(a[0], g[-1]) for a, g in zip(alone, got, strict=True)),
                }
                check_bits(findings, what, bits)
                for of, ours, theirs, right in zip(("weights", "momentum"), got, aten, exact, strict=True):
                    check_errors(findings, f"{what}, {of}", (ours, theirs), right, (MEAN, MOST))


def last_products(gradients: Tensor, setting: Setting) -> dict[str, _Update]:
    """Updates of one step of the iteration: with a last product of its own, and with one that moves the weights."""
    sides = setting.candidates(gradients.shape[-2], gradients.shape[-1])
    others = next(plain_choice(one)[1:-1] for one in sides if one.backend == FULL)
    return {name: _Update(choice_of(name, *others, ""), "cuda", gradients, setting, 1) for name in (FULL, FUSED)}


def check_last_products(device: Device, findings: Findings, where: torch.device) -> None:
    """A last product that moves the weights has the bits of a product and a move. Some matrices have odd sides."""
    for shape in CHECKED:
        for dtype in (torch.float16, torch.bfloat16):
            b, m, n = scaled(device, shape)
            n -= 3 * (shape[2] % 8 != n % 8)
            for sides in ((b, m, n), (b, n, m)):
                known = last_products(random((2, *sides), where), Setting(where, dtype, COEFFICIENTS))
                equal = torch.equal(known[FULL]._weights, known[FUSED]._weights)
                check_bits(findings, f"fused {'x'.join(map(str, sides))} {str(dtype)[6:]}", {"as unfused": equal})


def copied_bytes(device: Device, where: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    much = torch.empty(1 << 28, device=where)
    more = torch.empty_like(much)
    return 8 * much.numel() / device.times({"copy": lambda _: more.copy_(much)})["copy"].device


def time_updates(device: Device, findings: Findings, where: torch.device) -> None:
    """The rates count 24 bytes an element, whatever is moved, beside a copy's, which counts 8."""
    findings.figure(copy_tb_s=copied_bytes(device, where) / 1e12)
    dtype = _C.default_ns_dtype(where)
    setting = Setting(where, dtype, COEFFICIENTS)
    for shape in SHAPES:
        size = shape[0] * shape[1] * shape[2]
        number = max(2, min(8, PAST_CACHES // (4 * size)))
        gradients = random((number, *shape), where)
        choice = _C.choose(shape[1], shape[2], COEFFICIENTS, len(COEFFICIENTS), where, dtype)
        sides = {name: _Update(choice, name, gradients, setting) for name in _C.elementwise(where, dtype)}
        times = device.times({name: side._run for name, side in sides.items()})
        for name, one in times.items():
            findings.figure(
                update="x".join(map(str, shape)),
                by=name,
                us=1e6 * one.device,
                host_us=1e6 * one.host,
                tb_s_of_24=BYTES * size / one.device / 1e12,
                x_aten=one.device / times["aten"].device,
            )
        last = last_products(gradients, setting)
        times = device.times({name: side._run for name, side in last.items()})
        for name, one in times.items():
            findings.figure(
                update_of_one_step="x".join(map(str, shape)),
                by=name,
                us=1e6 * one.device,
                host_us=1e6 * one.host,
                x_unfused=one.device / times[FULL].device,
            )
        del gradients, sides, last
