"""Bugs that are planted in a copy of the kernels' sources: the tests find each, and none in the sources as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUILT = ROOT / "build/release/tests/kernels/cuda"
SOURCES = "src/dmuon/kernels/cuda"

pytestmark = pytest.mark.skipif(
    not (BUILT / "kernels_cuda_test").exists(), reason="the CUDA kernels' tests are not built: there is no nvcc"
)

# Name, file, text that occurs once, and what replaces it.
PLANTED = [
    ("nothing", "move_weights.h", "", ""),
    ("one_column_more", "move_weights.h", "col + i < p.cols", "col + i <= p.cols"),
    ("fours_past_the_row", "move_weights.h", "col + 4 <= p.cols", "col < p.cols"),
    ("one_row_more", "move_weights.h", "row >= p.rows", "row > p.rows"),
    ("last_four_left_out", "move_weights.h", "(p.cols + p.width - 1) / p.width", "p.cols / p.width"),
    ("stride_of_the_other_matrix", "move_weights.h", "row * p.u_row_stride", "row * p.w_row_stride"),
    (
        "batch_stride_of_the_other_matrix",
        "move_weights.h",
        "machine::block_y() * p.u_batch",
        "machine::block_y() * p.w_batch",
    ),
    ("moves_always", "move_weights.h", "machine::load_u8(p.applies) == 0", "false"),
    (
        "fused",
        "move_weights.h",
        "p.decay * w + p.factor * Format::wide(u)",
        "__builtin_fmaf(p.decay, w, p.factor * Format::wide(u))",
    ),
    ("lanes_swapped", "move_weights.h", "p, old[2], update[2]", "p, old[2], update[3]"),
    (
        "bf16_read_as_fp16",
        "formats.h",
        "return machine::float_of_bf16(half);",
        "return machine::float_of_f16(half);",
    ),
    ("one_thread_less", "move_weights.h", "* kMoveWeightsThreads +", "* (kMoveWeightsThreads - 1) +"),
    ("direction_unchanged", "direction.h", "", ""),
    ("padding_not_written", "direction.h", "four < p_.x_rows * fours_a_row", "four < p_.rows * fours_a_row"),
    ("reads_padding", "direction.h", "p_.cols - col < 4 ? p_.cols - col : 4", "4"),
    ("aligned_by_guess", "direction.h", "count == 4 && p_.in_fours", "count == 4"),
    ("scale_left_out_of_the_norm", "direction.h", "scaled * scaled", "d * d"),
    ("momentum_moves_always", "direction.h", "if (again_ || !applies_) return;", "if (again_) return;"),
    ("momentum_moves_twice", "direction.h", "if (again_ || !applies_) return;", "if (!applies_) return;"),
    (
        "words_read_early",
        "direction.h",
        "}\n    machine::barrier();\n    if (machine::thread() != 0)",
        "}\n    if (machine::thread() != 0)",
    ),
    (
        "no_fence_before_the_ticket",
        "direction.h",
        "sums.largest));\n      machine::fence();",
        "sums.largest));",
    ),
    ("last_block_too_early", "direction.h", "(2 * kWarps) + 1 ==", "(2 * kWarps) + 2 =="),
    ("ticket_kept", "direction.h", "machine::store_u32(ticket_word(), 0);", ""),
    ("guess_kept", "direction.h", "(again_ ? kMemoGuess : kMemoScale)", "kMemoScale"),
    ("guess_believed", "direction.h", "again.memo_ + kMemoScale)", "again.memo_ + kMemoGuess)"),
    ("one_warp_left_out", "direction.h", "w < kWarps", "w < kWarps - 1"),
    ("blocks_of_columns_confused", "direction.h", "matrix_ % p_.inner_batch", "matrix_ / p_.inner_batch"),
    ("eps_not_scaled", "direction.h", "scale_ * p_.eps", "p_.eps"),
]


def _driver(folder: Path, file: str, old: str, new: str) -> None:
    """Compiles the fake driver with a changed kernel."""
    copy = folder / SOURCES
    shutil.copytree(ROOT / SOURCES, copy)
    text = (copy / file).read_text()
    if old:
        assert text.count(old) == 1, f"{old!r} must occur once in {file}"
        (copy / file).write_text(text.replace(old, new))
    includes = [f"-I{folder}/src", f"-I{ROOT}/src", f"-I{ROOT}", f"-I{ROOT}/tests/kernels/cuda/emulator"]
    libraries = [f"{BUILT}/libcuda_fake.a", "-Wl,--no-whole-archive", f"{BUILT}/libcuda_emulator.a"]
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off"]
    command += ["-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1"), *includes]
    command += [str(ROOT / "tests/kernels/cuda/fake/registry.cpp"), "-Wl,--whole-archive", *libraries]
    subprocess.run(command, check=True)


@pytest.mark.parametrize(("name", "file", "old", "new"), PLANTED, ids=[planted[0] for planted in PLANTED])
def test_a_planted_bug_is_found(tmp_path, name, file, old, new):
    _driver(tmp_path, file, old, new)
    done = subprocess.run(
        [BUILT / "kernels_cuda_test", "--gtest_brief=1", "--gtest_filter=MoveWeights*:Direction*"],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "FAKE_CUDA_DEVICE": "80"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode == 0) == (not old), done.stdout
