"""The parts of `make test-gpu` run on the emulated device, each alone, and a part that fails is heard of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("async_device")
RUNNER = Path(__file__).with_name("gpu_run.py")
DRIVER = RUNNER.parents[2] / "build/release/tests/kernels/cuda/driver/libcuda.so.1"
RUN_S = 1200  # a limit for hangs


def run(out: Path, parts: str, *options: str) -> subprocess.CompletedProcess[str]:
    """On the emulated device, also where there is a GPU."""
    program = [sys.executable, str(RUNNER), "--out", str(out), "--parts", parts, *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=RUN_S)


def test_what_users_add_trains_alike_on_one_device_and_on_ranks(tmp_path):
    done = run(tmp_path, "features")
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "features.log").read_text()
    figures = json.loads((tmp_path / "features.json").read_text())["figures"]
    assert [figure.get("mesh") for figure in figures] == [None, "1x2", "2x1"]


def test_a_part_leaves_its_figures_and_says_what_this_device_cannot_show(tmp_path):
    done = run(tmp_path, "training,memory")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads((tmp_path / f"{part}.json").read_text()) for part in ("training", "memory")]
    assert [report["status"] for report in reports] == ["passed", "passed"]
    assert 0 < reports[0]["figures"][0]["furthest_from_the_cpu"] <= 2e-2
    assert "the allocator's retries" in reports[1]["not_on_this_device"][0]
    assert "not on this device: the allocator's retries" in done.stdout


@pytest.mark.skipif(not DRIVER.exists(), reason="the fake CUDA driver is not built: no nvcc")
def test_the_kernels_are_checked_by_the_fake_driver(tmp_path):
    done = run(tmp_path, "kernels,steps")
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "kernels.log").read_text()
    claims = "cuda X X' ", "cuda R R ", "cuda_full Q X ", "fused ", "cuda update ", "cuda gram, rank 10"
    for claim in (*(f"ok: {claim}" for claim in claims), "zero stays zero"):
        assert claim in log, claim
    steps = json.loads((tmp_path / "steps.json").read_text())["figures"]
    names = ["adamw", "dmuon, ATen", "dmuon, untuned", "dmuon, tuned", "launches", "CUDA graphs"]
    assert [figure.get("optimizer", figure.get("narrow")) for figure in steps] == names


def test_the_host_of_many_ranks_is_timed_on_a_device():
    """Torch's `fake` backend has no options, so it names no timeout; on a device the engine asks for one."""
    tiny = ["--device", "emulated", "--blocks", "2", "--side", "16", "--rounds", "1", "--steps", "1"]
    program = [sys.executable, str(RUNNER.parents[2] / "bench/host_time.py"), *tiny]
    done = subprocess.run(program, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for model in ("matrices     dmuon", "transformer  dmuon", "heads        64 heads"):
        assert model in done.stdout


def test_a_part_that_ends_early_fails_by_name(tmp_path, monkeypatch):
    # The part's module is found, and what it imports first raises.
    (tmp_path / "torch.py").write_text("raise ImportError('no PyTorch here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run(tmp_path / "out", "memory")
    assert done.returncode == 1
    assert "failed: memory" in done.stderr
    assert json.loads((tmp_path / "out" / "memory.json").read_text())["status"] == "failed"


def test_what_the_time_does_not_reach_is_named_and_all_is_in_one_archive(tmp_path, monkeypatch):
    """The first part starts a process, as ranks are, and never ends."""
    (tmp_path / "torch.py").write_text(
        "import subprocess, time\nprint('pid', subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    archive = tmp_path / "all.tgz"
    done = run(tmp_path / "out", "memory,training", "--most", "21", "--archive", str(archive))
    assert done.returncode == 1
    assert "failed: memory" in done.stderr and "not begun: --parts training" in done.stderr
    assert "took longer than 21 s" in done.stdout
    with tarfile.open(archive) as file:
        assert sorted(file.getnames()) == ["out/memory.json", "out/memory.log"]
        log = file.extractfile("out/memory.log").read().decode()
    pid = int(log.split("pid ")[1].split()[0])
    status, until = Path(f"/proc/{pid}/status"), time.monotonic() + 30
    while _runs(status) and time.monotonic() < until:  # it was killed, and dies when it gets a core
        time.sleep(0.1)
    assert not _runs(status)


def _runs(status: Path) -> bool:
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:  # it has gone, maybe while this read
        return False


def test_an_unknown_part_is_refused(tmp_path):
    done = run(tmp_path, "memory,speed")
    assert done.returncode == 2
    assert "got speed" in done.stderr
