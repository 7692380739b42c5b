"""Several ranks on one device end where one process on the CPU ends. NCCL, which may refuse that, is tried."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_device import Device, NotHere
from gpu_part import Findings, run_part
from gpu_training import Weights, furthest, train
from part_training import BOUND

HERE = Path(__file__).resolve().parent
MESHES = ((1, 2), (2, 1), (2, 2))
RANKS_S = 150
# Each rank says that it is a host of its own, so that NCCL does not see one GPU twice; then sockets alone are left.
NCCL = {
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"),
    **dict.fromkeys(("NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE"), "0"),
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "WARN",
}


def part(device: Device, findings: Findings) -> None:
    """See the head of the file."""
    before, expected = train(torch.device("cpu"))
    check_ranks(device, findings, "gpu_training.py", MESHES, before, expected)


def check_ranks(
    device: Device,
    findings: Findings,
    program: str,
    meshes: Sequence[tuple[int, int]],
    before: Weights,
    expected: Weights,
) -> None:
    """Runs the program on the ranks of each mesh, and holds its weights to the expected ones."""
    for shape in meshes:
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder, "weights.pt")
            ended = run_ranks(program, shape, weights)
            if not weights.exists():
                if device.is_real and not any("mesh" in figure for figure in findings.figures):
                    raise NotHere(f"NCCL with {shape[0] * shape[1]} ranks on one GPU ended with {ended}; see the log")
                findings.check(f"{shape[0]} x {shape[1]} ranks end", False, ended)
                continue
            off = furthest(torch.load(weights), expected, before)
        findings.figure(mesh=f"{shape[0]}x{shape[1]}", furthest_from_one_process=off)
        findings.check(f"{shape[0]} x {shape[1]} ranks: weights within {BOUND} of their way", off <= BOUND, off)
    if not device.is_real:
        findings.leave_out("NCCL: these ranks were the emulated device's, over gloo")


def run_ranks(program: str, shape: tuple[int, int], weights: Path) -> list[int | None]:
    """The exit codes; None of one that was ended because it took too long."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = shape[0] * shape[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / program), str(weights), *map(str, shape)]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **NCCL, **common, "RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"})
        for rank in range(size)
    ]
    try:
        return [rank.wait(RANKS_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        return [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


if __name__ == "__main__":
    run_part("nccl", part)
