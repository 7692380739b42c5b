"""dmuon's CUDA kernels on the driver: their own tests, bits and errors of products and updates, rates beside ATen's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gpu_iteration
import gpu_others
import gpu_products
import gpu_updates
import torch
from gpu_device import Device, NotHere
from gpu_part import Findings, run_part

from dmuon import _C

ROOT = Path(__file__).resolve().parents[2]
BUILDS = ("release", "gpu")
TESTS_S, SANITIZER_S = 60, 90
# Without the emulator's own tests and `Unavailable`. Memory beyond 2^31 entries takes a sanitizer long.
TESTS = "-Unavailable.*:Emulator*:Warp*:Copies*"
SANITIZED = (
    "Symmetric*Test.*:Full*Test.*:DirectionTest.*:MoveWeightsTest.*:Multiply*"
    ":-*FarApart*:*FarFrom*:*Largest*:*BeyondTheMemory*"
)


def part(device: Device, findings: Findings) -> None:
    """See the head of the file."""
    where = device.use(0)
    if not device.is_real:
        import async_device

        if not async_device.has_cuda_kernels():
            raise NotHere("the fake CUDA driver is not built: no nvcc")
        async_device.use_cuda_kernels(90)
    why = _C.why_no_cuda_kernels(where)
    findings.check("dmuon's kernels run here", not why, why or "yes")
    if why:
        return
    checks = (gpu_products.check_products, gpu_updates.check_updates, gpu_updates.check_last_products)
    for check in (*checks, gpu_iteration.check_iteration):
        findings.attempt(lambda check=check: check(device, findings, where))
    if not device.is_real:
        return findings.leave_out("rates, a driver's own errors, and compute-sanitizer")
    peak = gpu_products.peak_flops(device, where)
    findings.figure(peak_tflops=peak / 1e12)
    findings.attempt(lambda: gpu_products.time_products(device, findings, where, peak))
    findings.attempt(lambda: gpu_updates.time_updates(device, findings, where))
    findings.attempt(lambda: gpu_iteration.time_iteration(device, findings, where, peak))
    if why := gpu_others.why_not():
        findings.leave_out(f"Dao-AILab's kernels: {why}")
    torch.cuda.empty_cache()
    run_tests(findings)


def run_tests(findings: Findings) -> None:
    """The C++ tests of the kernels, if they are built; some of them also under compute-sanitizer, if there is one."""
    built = [ROOT / "build" / name / "tests/kernels/cuda/kernels_cuda_test" for name in BUILDS]
    tests = os.environ.get("DMUON_KERNELS_TEST") or next((str(one) for one in built if one.exists()), None)
    sanitizer = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH')}:/usr/local/cuda/bin")
    if tests is None:
        return findings.leave_out("kernels_cuda_test, which is not built")
    _run(findings, "kernels_cuda_test", [tests, f"--gtest_filter={TESTS}", "--gtest_brief=1"], TESTS_S)
    if sanitizer is None:
        return findings.leave_out("compute-sanitizer, which is not installed")
    for tool in ("memcheck", "racecheck"):
        options = ["--tool", tool, "--error-exitcode", "9"]
        program = [sanitizer, *options, tests, f"--gtest_filter={SANITIZED}", "--gtest_brief=1"]
        _run(findings, f"compute-sanitizer {tool}", program, SANITIZER_S)


def _run(findings: Findings, name: str, program: list[str], most_s: int) -> None:
    try:
        done = subprocess.run(program, stdout=sys.stdout, stderr=subprocess.STDOUT, timeout=most_s)
    except subprocess.TimeoutExpired:
        return findings.leave_out(f"{name}: took longer than {most_s} s")
    findings.check(f"{name} passes", done.returncode == 0, f"exit code {done.returncode}")


if __name__ == "__main__":
    run_part("kernels", part)
