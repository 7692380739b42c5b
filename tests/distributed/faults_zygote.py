"""A process that has imported everything and forks a mesh of ranks for each case: a rank that dies is not used again.

Forking is safe because no process group, and so no thread, exists before it. A case is one line of JSON on stdin; its
directory, on stdout, says that it is over. There, each rank leaves its events and what it wrote to stderr, and `ends`
tells how it ended.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # what the first step would import
from fault_program import NUM_RANKS, Case, play

DEADLINE_S = 300  # a limit for hangs: a case takes up to 20 s
LOOK_S = 0.02  # between two looks at the ranks


def fork_rank(rank: int, directory: Path) -> int:
    """0 in the rank's process."""
    pid = os.fork()
    if pid == 0:
        # The first call after a fork replaces PyTorch's thread pool, which is not thread-safe. Without this call the
        # threads of autograd race for it: with CUDA but no GPU, a backward starts eight once FakeTensorMode was used.
        torch.set_num_threads(1)
        os.dup2(os.open(directory / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(2, 1)
    return pid


def supervise(pids: dict[int, int], directory: Path) -> None:
    """Writes when and how each rank ended; kills what is left at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    ends: dict[int, tuple[float, int]] = {}
    while len(ends) < len(pids):
        for rank, pid in pids.items():
            if rank in ends:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ends[rank] = (time.monotonic(), os.waitstatus_to_exitcode(status))
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)
    (directory / "ends").write_text(json.dumps(ends))
    os.write(1, f"{directory}\n".encode())


def serve() -> tuple[int, Case, Path] | None:
    """Returns in each rank's process with what it is to play, and None in the others."""
    # Unbuffered: a forked copy of half-read requests would be read twice.
    with open(0, "rb", buffering=0) as requests:
        for line in iter(requests.readline, b""):
            task = json.loads(line)
            case, directory = Case(**task["case"]), Path(task["directory"])
            if os.fork():
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pids = {}
            for rank in range(NUM_RANKS):
                pids[rank] = fork_rank(rank, directory)
                if pids[rank] == 0:
                    return rank, case, directory
            supervise(pids, directory)
            return None
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for supervisors
    gc.freeze()  # what was imported is shared, and not walked through at the end of each rank
    part = serve()
    if part is not None:
        play(*part)  # as a script would: what it raises ends the interpreter
    sys.exit()
