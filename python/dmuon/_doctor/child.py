"""A function in a process of its own: a crash, a hang or a broken driver ends this process alone."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Pipe, wait
from typing import Any, NoReturn

from dmuon._doctor.findings import Event, Findings

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GRACE_S = 2.0  # for the process to write down where it is
_LOOK_S = 0.1
_LOG_LINES = 30


class Child:
    """Runs `function(findings, *arguments)` in a fork of this process, at most for `limit_s` seconds.

    for number, event in events([Child(60, function, 1), Child(60, function, 2)]): ...

    The caller must not have used a device or autograd, which do not survive a fork. A child ends with its parent.
    """

    def __init__(self, limit_s: float, function: Callable[..., object], *arguments: Any) -> None:
        self.connection, theirs = Pipe(duplex=False)
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (as long as the child)
        self._start = time.monotonic()
        self._deadline = self._start + limit_s
        self.ended = False
        self._status: int | None = None  # of the process, once it has ended
        # Not multiprocessing: at exit that waits for every process, also for one that a driver does not let die.
        self.pid = os.fork()
        if self.pid == 0:
            _run(theirs, self._log, function, arguments)
        theirs.close()

    def arrived(self) -> Iterator[Event]:
        """Yields what the function has found since the last call. Sets `ended` when it has found everything."""
        alive, why = not self._has_died(0), ""
        try:
            while self.connection.poll():
                event = self.connection.recv()
                if event is None:
                    self.ended = True
                    return
                yield event
        except EOFError:
            alive = not self._has_died(_GRACE_S)
        if not alive:
            why = _words(self._status)
        elif time.monotonic() > self._deadline:
            why = f"did not end within {time.monotonic() - self._start:.0f} s"
            os.kill(self.pid, signal.SIGABRT)  # faulthandler then writes all threads' tracebacks
            self._has_died(_GRACE_S)
        if why:
            self.ended = True
            yield "failures", (why,)

    def hurry(self, most_s: float) -> None:
        """Shortens the time that is left."""
        self._deadline = min(self._deadline, time.monotonic() + most_s)

    def kill(self) -> None:
        if not self._has_died(0):
            os.kill(self.pid, signal.SIGKILL)
            self._has_died(_GRACE_S)

    def _has_died(self, most_s: float) -> bool:
        """Waits for the process at most so long."""
        end = time.monotonic() + most_s
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= end:
                return False
            else:
                time.sleep(_LOOK_S / 10)
        return True

    def log(self) -> str:
        """Returns the first and the last lines that the process and its libraries have printed."""
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if not line.startswith("Extension modules:")]
        if len(lines) > 2 * _LOG_LINES:
            lines[_LOG_LINES:-_LOG_LINES] = ["..."]
        return "\n".join(lines).strip()


def events(children: Sequence[Child], alone_s: float = math.inf) -> Iterator[tuple[int, Event]]:
    """Yields what each child finds, with its number, until all have ended. Then ends the processes.

    When a child that failed has ended, the others get `alone_s` seconds, in which they may say why. The output of a
    child that failed is a detail.
    """
    running, failed = dict(enumerate(children)), set()
    try:
        while running:  # looks at the processes too: their own children may hold the pipes open
            wait([child.connection for child in running.values()], _LOOK_S)
            for number, child in list(running.items()):
                for event in child.arrived():
                    failed |= {number} if event[0] == "failures" else set()
                    yield number, event
                if child.ended:
                    del running[number]
                if child.ended and number in failed:
                    for other in running.values():
                        other.hurry(alone_s)
                    if log := child.log():
                        yield number, ("details", (log,))
    finally:
        for child in children:
            child.kill()


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _run(connection: Any, log: Any, function: Callable[..., object], arguments: tuple[Any, ...]) -> NoReturn:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    faulthandler.enable(log)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        try:
            function(Findings(connection.send), *arguments)
        except BaseException as error:
            connection.send(("failures", (one_line(error),)))
            connection.send(("details", (traceback.format_exc(),)))
        connection.send(None)
    finally:
        os._exit(0)  # a library's work at exit is of no interest, and may hang


def _words(status: int | None) -> str:
    if status is not None and status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"ended with status {status} before it had finished"
