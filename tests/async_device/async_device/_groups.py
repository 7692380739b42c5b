"""The c10d backend "emulated"."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from . import _extension

_native = _extension.load()


def _create(options: Any, _: Any) -> Any:
    store = dist.PrefixStore("emulated", options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, options.timeout)
    return _native.create_group(gloo, options.group_id, options.global_ranks_in_group, options.timeout)


def register_backend() -> None:
    """Registers it with c10d, as the default one of the device."""
    if dist.is_available():
        dist.Backend.register_backend("emulated", _create, extended_api=True, devices=["emulated"])
