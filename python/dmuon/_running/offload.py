"""Moves an optimizer's memory to the host while something else needs the device."""

from __future__ import annotations

import torch
import torch.nn as nn

from dmuon._running.runtime import runtime_of
from dmuon._setup.agreement import agreement


def offload(model: nn.Module) -> None:
    """Moves what dmuon keeps between steps to pinned host memory: masters, momenta, gradients and node copies.

    So a rollout, for example, has the device for itself. `load` brings everything back, bit by bit. In between,
    forwards, steps, state dicts and everything else that needs a weight raise. What `fully_shard` and AdamW keep stays.
    Collective over the mesh. The host waits for the copies.

    Raises:
        ValueError: the model has no dmuon.Muon yet, or is offloaded already.
    """
    runtime = runtime_of(model, "offload")
    runtime.refuse_while_averaged("offload()")
    runtime.meet("offload()")
    runtime.engine.move_out()
    runtime.offloaded = True
    if runtime.device.type != "cpu":
        torch.get_device_module(runtime.device.type).empty_cache()


def load(model: nn.Module) -> None:
    """Undoes `offload`. Collective over the mesh.

    Raises:
        ValueError: the model is not offloaded.
    """
    runtime = runtime_of(model, "load")
    with agreement(runtime.ranks, "load"):
        if not runtime.offloaded:
            raise ValueError("load: model: expected one after dmuon.offload")
    runtime.engine.move_back()
    runtime.offloaded = False
