"""The c10d backend "emulated"."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch.distributed as dist

from . import _extension

_native = _extension.load()


_FOR_EVER = datetime.timedelta(hours=1)
_is_connected = False


def _connect(store: Any, rank: int, size: int) -> None:
    """Ranks compare their orders of launches in the default group's store."""
    global _is_connected
    if not dist.is_initialized():  # this is the default group
        _native.connect(store.clone(), rank, size)
    elif not _is_connected:
        default = dist.PrefixStore("emulated", dist.distributed_c10d._get_default_store().clone())
        _native.connect(default, dist.get_rank(), dist.get_world_size())
    _is_connected = True


def _create(options: Any, _: Any) -> Any:
    store = dist.PrefixStore("emulated", options.store)
    _connect(store, options.group_rank, options.group_size)
    # Without a watchdog that sees it, a message on a device waits for ever.
    patience = _FOR_EVER if os.environ.get("ASYNC_DEVICE_PATIENT") else options.timeout
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, patience)
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    return _native.create_group(gloo, options.group_id, ranks, options.timeout)


def register_backend() -> None:
    """Registers it with c10d, as the default one of the device."""
    if dist.is_available():
        dist.Backend.register_backend("emulated", _create, extended_api=True, devices=["emulated"])
