"""Checks whether a saved value fits a tensor that no owner has. Says how ranks hold it, which must be alike."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dmuon._setup.slices import other_cut


def misfit(like: Any, value: Any, by_copy: bool = False) -> str | None:
    """Returns the reason why a tensor like this one cannot take a value, or None.

    `by_copy`: True if torch's load of a module takes it, which places DTensors of one mesh otherwise, and cuts no whole
    tensors.
    """
    shape, got = tuple(like.shape), tuple(getattr(value, "shape", ()))
    if not isinstance(value, torch.Tensor):
        return f"expected a tensor, got {type(value).__name__}"
    if got != shape and not (by_copy and shape == () and got == (1,)):  # of old checkpoints, which torch takes
        return f"expected shape {shape}, got {got}"
    if not isinstance(like, DTensor):
        return None if not isinstance(value, DTensor) else "expected a whole tensor, got a DTensor"
    if isinstance(value, DTensor):
        return None if by_copy and value.device_mesh == like.device_mesh else other_cut(value, like)
    if by_copy:
        return (
            "expected a DTensor, got a whole tensor, which set_model_state_dict of "
            "torch.distributed.checkpoint.state_dict cuts with StateDictOptions(full_state_dict=True)"
        )
    return None


def form(value: Any) -> str:
    """Returns how ranks hold a value: with another form one would wait for messages that others do not send."""
    return f"sharded by {list(value.placements)}" if isinstance(value, DTensor) else "whole"
