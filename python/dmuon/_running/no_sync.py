"""The context that postpones traffic between nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.nn as nn

from dmuon._running.runtime import Runtime, runtime_of


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Postpones traffic of gradients between nodes while the backwards of micro-steps run.

    Backwards inside send gradients to the node's column members alone, which sum them in fp32: 4 bytes for each of 1/G
    of the weights, which no plan counts. The next backward outside sends the sums to the owners, and frees them. On a
    mesh of one node nothing changes for matrices. On HSDP, FSDP2 treats its own gradients alike
    (`set_requires_all_reduce`). Gradients of AdamW that no fully_shard manages stay the rank's own, on every mesh.
    Contexts may be nested; the outermost counts.

        for micro_step in range(n):
            with dmuon.no_sync(model) if micro_step < n - 1 else contextlib.nullcontext():
                loss(model, batch).backward()

    Every rank enters it around the same backwards. End with a synchronised backward: a step without one sends the sums
    of matrices first, but FSDP2's AdamW parameters would miss theirs.

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
        return  # on a mesh of 1 x G, FSDP2 would not reduce its gradients until it syncs
    for module in runtime.fsdp_modules:
        module.set_requires_all_reduce(sync, recurse=False)
