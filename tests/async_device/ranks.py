"""Worker processes whose default group has both backends: "gloo" for CPUs and "emulated"."""

from __future__ import annotations

import datetime
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = str(Path(__file__).parent)
BACKENDS = "cpu:gloo,emulated:emulated"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _work(rank: int, size: int, port: int, timeout_s: float, connection: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    sys.path.insert(0, HERE)
    import async_device

    torch.set_num_threads(1)
    torch.emulated.set_device(rank)
    dist.init_process_group(BACKENDS, timeout=datetime.timedelta(seconds=timeout_s))
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            async_device.reset()
            connection.send(("ok", function(**arguments)))
        except BaseException:
            connection.send(("error", traceback.format_exc()))


class Ranks:
    """`size` processes; `run` calls one function on all of them."""

    def __init__(self, size: int, timeout_s: float = 30) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])
        port = _free_port()
        self._workers = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, port, timeout_s, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What the function, which stands at the top of its module, returns on each rank."""
        answers = self.answers(function, **arguments)
        errors = [f"--- rank {rank} ---\n{value}" for rank, (kind, value) in enumerate(answers) if kind != "ok"]
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return [value for _, value in answers]

    def answers(self, function: Callable[..., Any], **arguments: Any) -> list[tuple[str, Any]]:
        """For each rank ("ok", result), ("error", traceback) or ("died", None)."""
        for _, connection in self._workers:
            connection.send((function, arguments))
        answers = []
        for _, connection in self._workers:
            try:
                answers.append(connection.recv() if connection.poll(60) else ("hangs", None))
            except (EOFError, ConnectionResetError):
                answers.append(("died", None))
        return answers

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []
