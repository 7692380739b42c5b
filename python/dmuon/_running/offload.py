"""Moves an optimizer's memory to the host while something else needs the device."""

from __future__ import annotations

import torch
import torch.nn as nn

from dmuon._running.runtime import runtime_of
from dmuon._setup.agreement import agreement


def offload(model: nn.Module) -> None:
    """Moves what dmuon keeps between steps to pinned host memory: masters, momenta, gradients and node copies.

    A rollout, for example, can then use the memory. `load` restores every bit. Replicated weights are freed; the next
    forward sends them again. In between, forwards, steps, state dicts and everything else that needs a weight raise.
    The tensors of `fully_shard` and AdamW stay on the device. Collective over the mesh. The host waits for the copies.
    After `load` PyTorch keeps the pinned memory for the next time.

    Raises:
        ValueError: on all ranks: the model has no dmuon.Muon yet, is offloaded already, or a rank's host has no memory
            for it. Then everything is as before.
    """
    runtime = runtime_of(model, "offload")
    runtime.meet("offload()", whole=True, averaged=True)
    try:
        with agreement(runtime.ranks, "offload"):
            runtime.engine.move_out()
    except BaseException:  # also an interrupt of this rank
        runtime.engine.move_back()
        raise
    runtime.access.set_offloaded(True)
    if runtime.device.type != "cpu":
        torch.get_device_module(runtime.device.type).empty_cache()


def load(model: nn.Module) -> None:
    """Undoes `offload`. Collective over the mesh.

    Raises:
        ValueError: on all ranks: the model is not offloaded, or a rank's device has no memory for it. Then free some,
            and call it again.
    """
    runtime = runtime_of(model, "load")
    with agreement(runtime.ranks, "load"):
        if not runtime.access.offloaded:
            raise ValueError("load: model: expected one after dmuon.offload")
        runtime.engine.move_back()  # on a rank whose peer had no memory, at the first call
    runtime.access.set_offloaded(False)
