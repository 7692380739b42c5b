"""Newton-Schulz on a device: time, TFLOP/s, launches, and its error against the same iteration in fp64."""

from __future__ import annotations

import torch
from gpu_device import Device
from gpu_part import Findings, run_part

from dmuon import _C

SHAPES = (
    (1, 512, 3584),
    (1, 3584, 3584),
    (1, 3584, 18944),
    (1, 8192, 28672),
    (8, 512, 3584),
    (1, 3583, 4097),
    (3, 1, 67),
)
SCALE = 32  # extents are divided by it where there is no hardware
STEPS = 5
CONDITIONS = (1e2, 1e4, 1e6)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def flops(batch: int, rows: int, cols: int) -> float:
    """Counts the direct form, whatever form runs: so TFLOP/s of different forms compare as their times do."""
    short, long = sorted((rows, cols))
    return STEPS * batch * (4.0 * short * short * long + 2.0 * short**3)


def part(device: Device, findings: Findings) -> None:
    """See the head of the file."""
    from exact import conditioned, relative_error, rounding_bound, textbook  # gpu_device has made it known

    where, rows = device.use(0), _C.resolve_coefficients("polar_express", STEPS)
    # Sums in fp16, which a program may allow for its own products, must not reach the iteration.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_accumulation = True

    def iterate(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return _C.orthogonalize(x, "polar_express", STEPS, 1e-7, dtype)

    for batch, *extents in SHAPES:
        m, n = extents if device.is_real else [max(1, extent // SCALE) for extent in extents]
        x = torch.randn(batch, m, n, generator=torch.Generator().manual_seed(0)).to(where)
        exact = torch.stack([textbook(one, rows, torch.float64) for one in x.double().to(_of_fp64(device))])
        for name, dtype in DTYPES.items():
            # The time of an emulated kernel says nothing.
            seconds = device.seconds(lambda x=x, dtype=dtype: iterate(x, dtype)) if device.is_real else None
            error = relative_error(iterate(x, dtype).to(exact.device), exact)
            findings.figure(
                shape=f"{batch}x{m}x{n}",
                dtype=name,
                ms=seconds and 1e3 * seconds,
                tflops=seconds and flops(batch, m, n) / seconds / 1e12,
                launches=device.kernels(lambda x=x, dtype=dtype: iterate(x, dtype)),
                error=error,
            )
            bound = rounding_bound(rows, dtype)
            findings.check(f"{name} {batch}x{m}x{n}: error <= {bound:.3g}", error <= bound, error)
    size = (1024, 2048) if device.is_real else (64, 128)
    for condition in CONDITIONS:
        x = conditioned(*size, condition).x.to(torch.float32)
        values = torch.linalg.svdvals(iterate(x.to(where), torch.float16).cpu().double())
        exact_values = torch.linalg.svdvals(textbook(x, rows, torch.float64))
        off = (values - exact_values).abs().max().item()
        findings.figure(condition=condition, largest=values[0].item(), least=values[-1].item(), furthest_off=off)
        # Values above fp16's rounding of the input end at fp64's values; none may exceed the polynomial's range.
        findings.check(
            f"condition {condition:.0e}: singular values <= 1.16", values[0].item() <= 1.16, values[0].item()
        )
    if not device.is_real:
        findings.leave_out("TFLOP/s: figures of real GPUs are outstanding")


def _of_fp64(device: Device) -> str:
    """The emulated device runs the CPU's kernels, which take as long on the CPU."""
    return "cuda" if device.is_real else "cpu"


if __name__ == "__main__":
    run_part("newton_schulz", part)
