"""The section of the network: interfaces, the one that gloo takes, variables of the environment, and limits."""

from __future__ import annotations

import os
import re
import resource
import socket

from dmuon._doctor.findings import Findings

_SHOWN = re.compile(
    r"(NCCL|TORCH_NCCL|TORCH_DIST|TORCH_GLOO|GLOO|DMUON|OMP|MKL|CUDA|PYTORCH)_\w+|MASTER_ADDR|RANK|LOCAL_RANK|WORLD_SIZE"
)
_FEW_FILES, _MANY_FILES = 4096, 65536
_ON = ("1", "true", "yes", "on", "y")


def network(findings: Findings) -> None:
    """Reports everything that decides how ranks reach each other."""
    from dmuon._setup.interface import VARIABLE, interface_of, interface_towards, ipv4_addresses

    known = dict(ipv4_addresses())
    findings.fact("interfaces", ", ".join(f"{name} {address}" for name, address in known.items()) or "none")
    host, chosen = socket.gethostname(), os.environ.get(VARIABLE, "")
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        findings.fact("host name", f"{host}, which does not resolve: {error}")
        address = "127.0.0.1"
    else:
        findings.fact("host name", f"{host}, {address}")
    taken = chosen or interface_of(address)
    findings.fact("gloo takes", f"{taken}, from {VARIABLE}" if chosen else f"{taken}, of the host's name")
    present = [name for _, name in socket.if_nameindex()]
    absent = [name for name in chosen.split(",") if name and name not in present]
    if absent:
        findings.hint(f"there is no interface {absent[0]}", f"set {VARIABLE} to one of {', '.join(known)}")
    elif not chosen and address.startswith("127."):
        reason = "the host's name resolves to a loopback address, through which gloo reaches no other host"
        command = "dmuon takes the way to MASTER_ADDR itself, unless your process group uses gloo: then export "
        findings.hint(reason, f"{command}{VARIABLE}=... on every host")
    if master := os.environ.get("MASTER_ADDR"):
        findings.fact("way to MASTER_ADDR", f"{master} through {interface_towards(master)}")
    for name in sorted(filter(_SHOWN.fullmatch, os.environ)):
        findings.fact(name, os.environ[name])
    _variables(findings)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings.fact("open files (ulimit -n)", f"{most[0]} of {most[1]}")
    if most[0] <= _FEW_FILES:
        reason = (
            f"a rank opens a socket to each other rank, and up to three more to those of its row and column: {most[0]} "
            f"open files suffice for about {most[0] * 3 // 5} ranks"
        )
        findings.hint(reason, f"ulimit -n {_MANY_FILES}, for more")


def _variables(findings: Findings) -> None:
    """Hints at variables that matter to dmuon."""

    def is_on(name: str) -> bool:
        return os.environ.get(name, "").lower() in _ON

    handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", os.environ.get("NCCL_ASYNC_ERROR_HANDLING", "3"))
    if handling != "3":
        reason = (
            f"TORCH_NCCL_ASYNC_ERROR_HANDLING={handling}: if a rank is lost, the others may hang, or train on nonsense"
        )
        findings.hint(reason, "unset TORCH_NCCL_ASYNC_ERROR_HANDLING (docs/errors.md, When a rank is lost)")
    if is_on("TORCH_DIST_USE_NCCL2"):
        findings.hint("TORCH_DIST_USE_NCCL2: dmuon was never run on that backend", "unset TORCH_DIST_USE_NCCL2")
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        if is_on(name):
            findings.hint(f"{name}: messages take a slower way", f"unset {name}, unless it cures a fault")
    if is_on("CUDA_LAUNCH_BLOCKING"):
        findings.hint("CUDA_LAUNCH_BLOCKING: nothing overlaps", "unset CUDA_LAUNCH_BLOCKING")
