"""Moves an optimizer's memory to the host while something else needs the device."""

from __future__ import annotations

import torch
import torch.nn as nn

from dmuon._running.runtime import Runtime, runtime_of
from dmuon._setup.agreement import agreement


def offload(model: nn.Module) -> None:
    """Moves what dmuon keeps between steps to pinned host memory: masters, momenta, gradients and node copies.

    So a rollout, for example, has the device for itself. `load` brings everything back, bit by bit. In between,
    forwards, steps, state dicts and everything else that needs a weight raise. What `fully_shard` and AdamW keep stays.
    Collective over the mesh. The host waits for the copies.

    Raises:
        ValueError: the model has no dmuon.Muon yet, or is offloaded already.
    """
    runtime = _runtime(model, "offload", False)
    runtime.engine.move_out()
    runtime.offloaded = True
    if runtime.device.type != "cpu":
        torch.get_device_module(runtime.device.type).empty_cache()


def load(model: nn.Module) -> None:
    """Undoes `offload`. Collective over the mesh.

    Raises:
        ValueError: the model is not offloaded.
    """
    runtime = _runtime(model, "load", True)
    runtime.engine.move_back()
    runtime.offloaded = False


def _runtime(model: nn.Module, function: str, offloaded: bool) -> Runtime:
    runtime = runtime_of(model, function)
    runtime.refuse_while_averaged(f"{function}()")
    if not offloaded:
        runtime.meet(f"{function}()")
    with agreement(runtime.ranks, function):
        if runtime.offloaded != offloaded:
            raise ValueError(f"{function}: model: expected one {'after' if offloaded else 'before'} dmuon.offload")
    return runtime
