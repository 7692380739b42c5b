"""Worker processes whose default group has both backends: "gloo" for CPUs and "emulated"."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pool import ANSWER_S, Workers, end_workers, start_workers, use_emulated_device


def _work(rank: int, timeout_s: float, connection: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(use_emulated_device(rank), timeout=datetime.timedelta(seconds=timeout_s))
    import async_device

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
        self._workers = start_workers(_work, size, timeout_s)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Runs a function of a module's top level on each rank. Returns their results."""
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
                answers.append(connection.recv() if connection.poll(ANSWER_S) else ("hangs", None))
            except (EOFError, ConnectionResetError):
                answers.append(("died", None))
        return answers

    def close(self) -> None:
        end_workers(self._workers)
        self._workers = Workers()
