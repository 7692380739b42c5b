"""dmuon's own test of its kernels, once a device and process, finds wrong kernels of each family, with one warning."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_planted_kernels import BUILT, HOPPER, KERNEL, ROOT, driver

pytestmark = pytest.mark.skipif(
    not (BUILT / "kernels_cuda_test").exists(), reason="the CUDA kernels' tests are not built: there is no nvcc"
)

PROGRAM = """
import sys
import torch
import async_device
from async_device import _cuda_kernels
from pathlib import Path

_cuda_kernels._DRIVER = Path(sys.argv[1]) / "libcuda.so.1"
async_device.use_cuda_kernels(int(sys.argv[2]))
from dmuon import _C

for _ in range(2):
    print(_C.why_no_cuda_kernels(torch.device("emulated", 0)))
"""
FAILED = "dmuon's kernels failed their test on emulated:0: results differ from PyTorch's"
SUM80 = "float value = alpha * sums"
SUMS90 = "{alpha * sums[half * 64 + i * 2], alpha"
# Compute capability, number of multiprocessors, name, file, text that occurs once, and what replaces it.
RUNS = [
    (80, 132, "nothing", KERNEL, "", ""),
    (90, 132, "nothing", KERNEL, "", ""),
    (90, 4, "nothing_on_few_multiprocessors", KERNEL, "", ""),
    (90, 1, "nothing_on_one_multiprocessor", KERNEL, "", ""),
    (
        80,
        132,
        "direction",
        "direction.h",
        "const float scaled = scale_ * d;",
        "const float scaled = 2 * scale_ * d * d;",
    ),
    (80, 132, "move_weights", "move_weights.h", "load_f32(p.factor)", "load_f32(p.decay)"),
    (80, 132, "multiply", "multiply.h", "product(pair >> 16) << 16", "product(pair & 0xffffU) << 16"),
    (80, 132, "symmetric80", KERNEL, SUM80, "float value = (Result::kIsSymmetric ? 3 : 1) * alpha * sums"),
    (80, 132, "full80", KERNEL, SUM80, "float value = (Result::kIsSymmetric ? 1 : 3) * alpha * sums"),
    (80, 132, "c_of_the_first_matrix", KERNEL, "p_.c + matrix_ * p_.c_batch_stride", "p_.c"),
    (80, 132, "without_c", KERNEL, "p_.beta * ", "0 * p_.beta * "),
    (90, 132, "symmetric90", HOPPER, SUMS90, "{(Result::kIsSymmetric ? 3 : 1) * " + SUMS90[1:]),
    (90, 132, "full90", HOPPER, SUMS90, "{(Result::kIsSymmetric ? 1 : 3) * " + SUMS90[1:]),
    (90, 132, "full90_transposed", HOPPER, SUMS90, "{(kTransposedB && !kTransposedA ? 3 : 1) * " + SUMS90[1:]),
    (90, 132, "mirror", "staged_tile.h", "return {col + lane / 4, first", "return {col + (lane ^ 4) / 4, first"),
]


@pytest.mark.rarer(2)
@pytest.mark.parametrize(
    ("capability", "multiprocessors", "name", "file", "old", "new"), RUNS, ids=[f"{run[0]}-{run[2]}" for run in RUNS]
)
def test_wrong_kernels_are_left_out(tmp_path, capability, multiprocessors, name, file, old, new):
    driver(tmp_path, file, old, new)
    paths = [str(ROOT / "tests/async_device"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(capability)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "FAKE_CUDA_MULTIPROCESSORS": str(multiprocessors),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [FAILED if old else ""] * 2
    assert done.stderr.count("PyTorch's operators take their place") == (1 if old else 0)


def test_what_is_replaced_occurs_once():
    for *_, file, old, _ in RUNS:
        if old:
            assert (ROOT / "src/dmuon/kernels/cuda" / file).read_text().count(old) == 1, f"{old!r} in {file}"
