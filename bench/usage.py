"""What a program uses of links and processors, read from outside of it, and what these alone would take."""

from __future__ import annotations

import os
import re
import time
from dataclasses import astuple, dataclass
from pathlib import Path

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Usage:
    """Bytes as the kernel's interface counters have them, TCP/IP headers included, and time of processors."""

    intra: float  # bytes over loopback: between ranks of one node; of this host or network namespace
    inter: float  # bytes sent over the interface that BENCH_IFACE names; 0 where that is loopback itself
    received: float  # bytes received over it
    cpu_s: float  # seconds of processors that this process and its threads took

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


def read_usage() -> Usage:
    """The counters now; let transfers in flight end before reading."""
    table = Path("/proc/net/dev").read_text()

    def counters(interface: str) -> tuple[int, int]:
        row = re.search(rf"^\s*{re.escape(interface)}:(.*)$", table, re.MULTILINE)
        fields = row[1].split() if row else ["0"] * 9
        return int(fields[8]), int(fields[0])

    interface = os.environ.get("BENCH_IFACE", "lo")
    sent, received = counters(interface) if interface != "lo" else (0, 0)
    return Usage(counters("lo")[0], sent, received, time.process_time())


def wire_seconds(sent: list[float], received: list[float]) -> float | None:
    """The time that the busiest link of a node takes for these bytes of each node. None: nothing limits the links."""
    rate = re.match(r"([\d.]+)([a-z]+)", os.environ.get("BENCH_RATE", ""))  # a delay may follow
    return None if rate is None else 8 * max(*sent, *received) / (float(rate[1]) * _BITS[rate[2]])


def processor_seconds(cpu_s: list[float]) -> float:
    """The time that this machine's processors take, if they share the time of all ranks evenly."""
    return sum(cpu_s) / len(os.sched_getaffinity(0))
