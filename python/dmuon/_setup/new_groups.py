"""Creates process groups. Only their members wait, and members agree on a group's name whatever else they created."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import socket
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from dmuon._setup.interface import VARIABLE, reachable_interface
from dmuon._setup.ranks import Ranks, backends

_CONNECT = datetime.timedelta(minutes=2)

# Has, by default process group and key, the number of groups that this process has begun to create.
_num_begun: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[Hashable]] = weakref.WeakKeyDictionary()


def new_group(purpose: str, members: tuple[int, ...], ranks: Ranks, backend: str | None = None) -> dist.ProcessGroup:
    with _unbound_world():
        group: dist.ProcessGroup = dist.new_group(
            list(members),
            timeout=ranks.timeout,
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"dmuon {purpose}",
        )
    if backend is None and ranks.device_type != "cpu":
        # NCCL makes its communicator at the first message: here, not inside the first forward.
        dist.all_reduce(torch.zeros(1, device=ranks.device), group=group)
    return group


def new_host_group(purpose: str, members: tuple[int, ...], ranks: Ranks) -> dist.ProcessGroup:
    """Creates a group over the hosts' network.

    Raises:
        ValueError: the hosts do not reach each other. All ranks have just met, so a short time will do.
    """
    backend = backends().get("cpu", "gloo")
    if backend != "gloo":
        return new_group(purpose, members, ranks, backend)
    timeout = ranks.timeout or default_pg_timeout
    hasty = dataclasses.replace(ranks, timeout=min(timeout, _CONNECT))
    with reachable_interface() as interface:
        try:
            group = new_group(purpose, members, hasty, backend)
        except RuntimeError as error:
            took = (
                f"interface '{interface}'" if interface else f"the address of its host's name, {socket.gethostname()}"
            )
            raise ValueError(
                f"dedicate_params: mesh: expected ranks that reach each other by gloo within {_CONNECT}. "
                f"This rank offered {took}. Set {VARIABLE} on every host to the interface through which hosts reach "
                f"each other. Reported: {error}"
            ) from error
    set_timeout(timeout, group)
    return group


def set_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup) -> None:
    """Sets the timeout of later operations of a group. The public name exists since PyTorch 2.14."""
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(timeout, group)


@contextmanager
def named(key: Hashable) -> Iterator[None]:
    """Names the group that is created inside the context. All its members agree on the name.

    PyTorch's own name depends on the number of groups that a rank knows (before 2.14) or created. If the numbers of
    two members differ, both wait until the timeout. PyTorch 2.14 also counts the group on its members only. The next
    group of all ranks then has different names, and its creation never ends.
    """
    c10d: Any = dist.distributed_c10d
    counts = _num_begun.setdefault(c10d._get_default_group(), Counter())
    counts[key] += 1
    name = hashlib.sha1(repr(("dmuon", counts[key], key)).encode(), usedforsecurity=False).hexdigest()
    original = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        c10d._process_group_name = original


@contextmanager
def _unbound_world() -> Iterator[None]:
    """Hides the device that `init_process_group(device_id=)` has bound the world to, inside the context.

    NCCL splits a bound world and waits for all of its ranks, but the ranks outside the mesh never come.
    """
    world = dist.distributed_c10d._get_default_group()
    bound = world.bound_device_id
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def is_usable(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True
