"""Worker processes that stay alive over many multi-rank tests, forked from one that has imported everything.

So they also share its hash seed and addresses. What must not depend on these, such as the order of collectives, is
tested by test_cluster, whose ranks are programs of their own, as under torchrun.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import gc
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from default_device import on_default_device
from dmuon._running import plain_gradients
from torch.distributed.device_mesh import DeviceMesh

HERE = str(Path(__file__).parent)
# Where the tests of this folder run: on CPUs, or "emulated", on the asynchronous device (tests/async_device).
TEST_DEVICE = os.environ.get("DMUON_TEST_DEVICE", "cpu")
# Limits for hangs: the slowest test, which compiles a model, takes 10 s on an idle machine.
COLLECTIVE_S = 300
ANSWER_S = 600
AFTER_A_DEATH_S = 60  # of a process that answered nothing
LATE = "no answer in time"
# Until the ranks of a mesh have met, usually a second. With one thread for all groups, gloo's creation of a mesh's
# groups, before dmuon does anything, hangs once in some thousand times.
MEET_S, MOST_STARTS = 120, 3


class RankFailed(AssertionError):
    """A function raised on some rank; the message holds every rank's traceback."""


def make_mesh(shape: tuple[int, ...], device_type: str = "cpu") -> DeviceMesh:
    """The first ranks of the world in this shape; every rank of the world takes part in making it."""
    names = ("replicate", "shard", "extra")[: len(shape)] if len(shape) > 1 else ("shard",)
    table = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return DeviceMesh(device_type, table, mesh_dim_names=names)


def use_emulated_device(rank: int) -> str:
    """Registers it (tests/async_device). Returns the backends of a process group that has it."""
    sys.path.insert(0, str(Path(HERE).parent / "async_device"))
    import async_device

    torch.emulated.set_device(rank)
    atexit.register(async_device.reset)
    return "cpu:gloo,emulated:emulated"


def share_gloos_thread() -> None:
    """All gloo groups of this process are made on one device.

    By default each has its own, with a thread that wakes a hundred times a second. A rank of a pool has some sixty
    groups, for all the meshes that tests ask for: the ranks of a test run would spend half a core on it.

    The thread gives way to the others: where one of these was interrupted with a lock that it needs, it spins.
    """
    make = dist.ProcessGroupGloo.__init__
    device = dist.ProcessGroupGloo.create_default_device()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().startswith("gloo_tcp"):
                os.setpriority(os.PRIO_PROCESS, int(task.name), 19)

    def make_on_device(self: Any, store: Any, rank: int, size: int, timeout: datetime.timedelta, **newer: Any) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        for name, value in newer.items():  # PyTorch 2.14 has enable_reconfigure
            setattr(options, name, value)
        make(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = make_on_device


class Workers(list[tuple[Any, Any]]):
    """Processes and the connections to them, and the store at which they meet.

    This process keeps the store: another program could take a port that was free before a rank listens on it.
    """

    store: dist.TCPStore


def _begin(work: Callable[..., None], rank: int, size: int, port: int, *arguments: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    faulthandler.register(signal.SIGUSR1)  # tells where all threads are
    share_gloos_thread()
    work(rank, *arguments)


def start_workers(work: Callable[..., None], size: int, *arguments: Any) -> Workers:
    """Processes that run `work(rank, *arguments, connection)`, with what torchrun would put into their environment."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "dmuon", "pytest"])
    workers = Workers()
    workers.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in range(size):
        ours, theirs = context.Pipe()
        given = (work, rank, size, workers.store.port, *arguments, theirs)
        process = context.Process(target=_begin, args=given, daemon=True)
        process.start()
        theirs.close()
        workers.append((process, ours))
    return workers


def end_workers(workers: Workers) -> None:
    for process, connection in workers:
        connection.close()
        process.kill()
        process.join()


def _work(rank: int, device_type: str, is_default: bool, connection: Any) -> None:
    sys.path.insert(0, HERE)
    faulthandler.enable()
    gc.freeze()  # what was imported is not looked through again by each collection
    torch.set_num_threads(1)
    os.nice(10)  # test_faults, which may run beside, watches the clock
    with contextlib.suppress(OSError):  # only saves time
        # No rank interrupts another: gloo's threads spin on locks whose holder was interrupted.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    backends = "gloo" if device_type == "cpu" else use_emulated_device(rank)
    dist.init_process_group(backends, timeout=datetime.timedelta(seconds=COLLECTIVE_S))
    plain_gradients.LARGE = 500  # embeddings of tests' models, and no norms
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    while True:
        try:
            function, shape, kwargs = connection.recv()  # which imports the function's module
            if shape not in meshes:
                meshes[shape] = make_mesh(shape, device_type)
            connection.send(("meets", None))
            if rank >= torch.Size(shape).numel():
                connection.send(("outside", None))
                continue
            torch.manual_seed(0)  # whichever tests came before, ranks draw the same
            plain_gradients.PlainGradients._models.clear()  # of those tests, which may be garbage still
            if is_default:
                connection.send(("ok", on_default_device(function, meshes[shape], kwargs)))
                continue
            if device_type != "cpu":
                sys.modules["async_device"].reset()  # what a program has set is over with it
            connection.send(("ok", function(meshes[shape], **kwargs)))
        except EOFError:  # the pool is closed
            return
        except Exception:
            connection.send(("error", traceback.format_exc()))
            # As a script would end: peers that wait for this rank must hear of it.
            atexit._run_exitfuncs()
            os._exit(1)


def _first_line(error: str) -> str:
    """Of what was raised, below the traceback. The lines after it tell what ranks did."""
    return re.split(r"\n(?=\S*Error: )", error)[-1].splitlines()[0]


def _told(errors: dict[int, str]) -> str:
    """The errors of all ranks. Ranks that merely lost a peer come first, with a line each: a cut log keeps its end."""
    lost = {rank for rank, error in errors.items() if "gloo/transport" in error}
    if lost == errors.keys():
        lost = set()
    lines = [f"--- rank {rank} ---\n{_first_line(errors[rank])}" for rank in sorted(lost)]
    return "\n".join(lines + [f"--- rank {rank} ---\n{errors[rank]}" for rank in sorted(errors.keys() - lost)])


class RankPool:
    """`size` processes on gloo; `run` calls one function on all ranks of a mesh and returns their results."""

    def __init__(self, size: int = 4, answer_s: float = ANSWER_S, device_type: str = "") -> None:
        """`device_type`: of the meshes; without it TEST_DEVICE, which is then the default one inside of functions."""
        self._size, self._answer_s = size, answer_s
        self._arguments = (device_type or TEST_DEVICE, not device_type and TEST_DEVICE != "cpu")
        self._workers = Workers()
        self.met = 0.0  # when the ranks of the last call did

    def begin(self, function: Callable[..., Any], mesh: tuple[int, ...], **kwargs: Any) -> None:
        """Calls it as `run` does and waits for no answer: for ranks that `close` kills in the midst of it."""
        for start in range(1, MOST_STARTS + 1):
            if not self._workers:
                self._workers = start_workers(_work, self._size, *self._arguments)
            for _, connection in self._workers:
                connection.send((function, mesh, kwargs))
            answers = self._answers(MEET_S)
            self.met = time.monotonic()
            if all(kind == "meets" for kind, _ in answers.values()):
                return
            self.close()
            told = _told({rank: str(value) for rank, (_, value) in answers.items()})
            if start == MOST_STARTS or ("error", LATE) not in answers.values():
                raise RankFailed(told)
            print(f"the ranks of {mesh} have not met, and start again: {told}", file=sys.stderr)

    def run(self, function: Callable[..., Any], mesh: tuple[int, ...], **kwargs: Any) -> list[Any]:
        """The result of `function(mesh, **kwargs)` on each rank of the mesh.

        Args:
            function: what to call; it is sent by its name, and so must stand at the top of its module.
            mesh: the shape of the mesh.
            **kwargs: more arguments of the function, and anything that can be pickled.

        Raises:
            RankFailed: a rank raised or did not answer; the processes are then replaced.
        """
        self.begin(function, mesh, **kwargs)
        answers = self._answers(self._answer_s)
        errors = {rank: value for rank, (kind, value) in answers.items() if kind == "error"}
        if errors:
            self.close()
            raise RankFailed(_told(errors))
        results = [value for _, (kind, value) in sorted(answers.items()) if kind == "ok"]
        assert len(results) == torch.Size(mesh).numel()
        return results

    def _answers(self, most_s: float) -> dict[int, tuple[str, Any]]:
        """Returns each rank's kind of answer and its value. Once a process has died, the others have a time more."""
        answers: dict[int, tuple[str, Any]] = {}
        ranks = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        deadline = time.monotonic() + most_s
        while ranks and (ready := wait(ranks, max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = ranks.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    process = self._workers[rank][0]
                    process.join(10)
                    answers[rank] = "error", f"the process died, exit code {process.exitcode}"
                    deadline = min(deadline, time.monotonic() + AFTER_A_DEATH_S)
        for rank in ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
            time.sleep(0.2)  # one after the other
        return answers | dict.fromkeys(ranks.values(), ("error", LATE))

    def close(self) -> None:
        end_workers(self._workers)
        self._workers = Workers()
