"""The context that postpones traffic between nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.nn as nn

from dmuon._running.runtime import Runtime, runtime_of


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keeps gradients inside the node while a micro-step's backward runs.

    Backwards in this context route gradients to the node's column members alone, which add them up in fp32 (4 bytes
    for 1/G of the weights); the next backward outside of it sends the sums to the owners. On a mesh of one
    node it changes nothing. On HSDP, FSDP2's own gradients do alike (`set_requires_all_reduce`).
    Contexts may be nested; the outermost counts.

        for micro_step in range(n):
            with dmuon.no_sync(model) if micro_step < n - 1 else contextlib.nullcontext():
                loss(model, batch).backward()

    Every rank enters it around the same backwards. A step that comes without a synchronised backward
    sends what was kept first; FSDP2's AdamW parameters would miss it, so end with one.

    Raises:
        ValueError: the model has no `dmuon.Muon` yet.
    """
    runtime = runtime_of(model, "no_sync")
    runtime.no_sync_depth += 1
    try:
        if runtime.no_sync_depth == 1:
            _set_sync(runtime, False)
        yield
    finally:
        runtime.no_sync_depth -= 1
        if runtime.no_sync_depth == 0:
            _set_sync(runtime, True)


def _set_sync(runtime: Runtime, sync: bool) -> None:
    runtime.engine.set_sync(sync)
    if runtime.ranks.host_replicates == 1:
        return  # FSDP2 on a mesh of 1 x G would keep its gradients from the sharded ones until it syncs
    for module in runtime.fsdp_modules:
        module.set_requires_all_reduce(sync, recurse=False)
