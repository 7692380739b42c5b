"""Bytes sent, read from outside the program: the kernel's interface counters (TCP/IP headers included)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Traffic:
    """Bytes transmitted by this host or network namespace, all its ranks together."""

    intra: int  # over loopback: between ranks of one node
    inter: int  # over the interface that BENCH_IFACE names; 0 where that is loopback itself

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.intra - other.intra, self.inter - other.inter)


def read_traffic() -> Traffic:
    """The counters now; let transfers in flight end before reading."""
    table = Path("/proc/net/dev").read_text()

    def transmitted(interface: str) -> int:
        row = re.search(rf"^\s*{re.escape(interface)}:(.*)$", table, re.MULTILINE)
        return int(row[1].split()[8]) if row else 0

    interface = os.environ.get("BENCH_IFACE", "lo")
    return Traffic(transmitted("lo"), transmitted(interface) if interface != "lo" else 0)
