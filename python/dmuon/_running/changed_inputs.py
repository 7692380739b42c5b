"""Inputs of a module that its call changes in place: the call has a copy, which shares their memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dmuon import _C


def take_changes(module: str, inputs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Gives tensors that a call has changed in place their new history. Returns them: they are outputs of it, too.

    Args:
        module: what was called.
        inputs: tensors as the caller has them, and as the call has got them from `watch_inputs`.

    Raises:
        ValueError: autograd would have forbidden the change. Names `module`.
    """
    changed = []
    for given, watched in inputs:
        if watched.grad_fn is None or watched.grad_fn.name() == _C.LEAVING_BACKWARD:
            continue
        try:
            what = "a leaf that requires a gradient" if given.is_leaf else ""
        except RuntimeError:  # autograd knows no history of such a view after a change
            what = "of which fully_shard has made a view"
        if what:
            raise ValueError(
                f"dmuon: '{module}' has changed an input in place, {what}, as no program can without dmuon. Expected: "
                "a change of a copy, such as x = x + y in place of x += y."
            )
        _C.take_history(given, watched)
        changed.append(given)
    return changed
