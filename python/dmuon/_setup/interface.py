"""The network interface that gloo takes for dmuon's host groups, in a program that never needed gloo before."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from dmuon._setup.ranks import backends

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


@contextlib.contextmanager
def reachable_interface() -> Iterator[str | None]:
    """Lets gloo use the interface through which this rank reaches `MASTER_ADDR`, inside the context.

    By itself gloo takes the address of the host's name. On many hosts that is a loopback address, or the network of
    another card. Programs on NCCL never notice. Does nothing if the user has set the variable, or if the default
    process group has a backend for CPUs, which then works already.

    Yields:
        The interface that gloo takes, or None if gloo chooses.
    """
    if VARIABLE in os.environ:
        yield os.environ[VARIABLE]
        return
    interface = None if "cpu" in backends() else interface_towards(os.environ.get("MASTER_ADDR", ""))
    if interface is None:
        yield None
        return
    os.environ[VARIABLE] = interface
    try:
        yield interface
    finally:
        del os.environ[VARIABLE]


def interface_towards(host: str) -> str | None:
    """Returns the interface through which packets to this host leave, or None if nobody knows. Sends nothing.

    The host itself reaches its own name through the loopback interface. If its name has another address too, the
    interface of that address is returned.
    """
    found = None
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else ():
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                found = interface_of(probe.getsockname()[0])
            if found not in (None, "lo"):
                break
    return found


def interface_of(address: str) -> str | None:
    """Returns the interface that has this address, or None."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6 and wanted.ipv4_mapped is None:
        table = Path("/proc/net/if_inet6")
        rows = (line.split() for line in table.read_text().splitlines()) if table.exists() else ()
        return next((row[-1] for row in rows if int(row[0], 16) == int(wanted)), None)
    wanted = getattr(wanted, "ipv4_mapped", None) or wanted
    return next((name for name, address in ipv4_addresses() if address == str(wanted)), None)


def ipv4_addresses() -> Iterator[tuple[str, str]]:
    """Yields each interface that has an IPv4 address, and the first one of its addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
