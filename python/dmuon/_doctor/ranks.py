"""The section of ranks: two processes train a tiny model and end where one process ends; times of their messages."""

from __future__ import annotations

import tempfile
from typing import Any

from dmuon._doctor.child import Child, events
from dmuon._doctor.devices import accelerators
from dmuon._doctor.findings import Findings, Section
from dmuon._doctor.rank import Spot, one_process, rank, rendezvous

_LIMIT_S = 100.0  # of two ranks; NCCL takes tens of seconds to start on some machines
_ALONE_S = 10.0  # for the other rank, after one has failed
# Each rank says that it is a host of its own, so that NCCL does not refuse a GPU twice; then sockets alone are left.
_ONE_GPU = {
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"),
    **dict.fromkeys(("NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE"), "0"),
    "NCCL_SOCKET_IFNAME": "lo",
}


def ranks(findings: Findings) -> None:
    """Tests ranks on the CPU, and on accelerators if there are any."""
    _pair(findings, "2 ranks on cpu", rank, ["cpu", "cpu"], {})
    found = _seen(findings)
    if not found:
        return
    _told(findings, "1 process", [Child(_LIMIT_S, one_process, found[0])])
    if len(found) > 1:
        _pair(findings, f"2 ranks on {found[0]} and {found[1]}", rank, found[:2], {})
        return
    name = f"2 ranks on {found[0]}"
    refused = Section(name)
    _pair(Findings(refused.take), name, rendezvous, found * 2, _ONE_GPU)
    if refused.failures:
        findings.fact(name, f"not tested: the backend takes no device twice ({refused.failures[0]})")
    else:
        _pair(findings, name, rank, found * 2, _ONE_GPU)


def _seen(findings: Findings) -> list[str]:
    """Returns the accelerators, as another process sees them: the ranks are forks of one that has used no device."""
    seen = Section("")
    child = Child(_LIMIT_S, lambda own: [own.fact(str(device), "") for device in accelerators()])
    for _, event in events([child]):
        seen.take(event)
    for why in seen.failures:
        findings.fail(f"accelerators: {why}")
    return [name for name, _ in seen.facts]


def _pair(findings: Findings, name: str, run: Any, places: list[str], environment: dict[str, str]) -> None:
    # They meet at a file: another program may take a port that was free, before a rank listens on it.
    with tempfile.TemporaryDirectory(prefix="dmuon-doctor-") as folder:
        spots = [Spot(name, number, f"{folder}/store", place, environment) for number, place in enumerate(places)]
        _told(findings, name, [Child(_LIMIT_S, run, spot) for spot in spots])


def _told(findings: Findings, name: str, children: list[Child]) -> None:
    """Passes on the events of the children, and names the rank in failures."""
    for number, (kind, values) in events(children, _ALONE_S):
        findings.send((kind, (f"{name}: rank {number}: {values[0]}",) if kind == "failures" else values))
