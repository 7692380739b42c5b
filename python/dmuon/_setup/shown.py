"""What a message says it got: in a few words, whatever a user has passed."""

from __future__ import annotations

import torch
import torch.nn as nn

_MOST = 80  # characters


def shown(value: object) -> str:
    """A tensor by its shape and a module by its class, in tuples and lists too; anything else as it prints, cut off."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if type(value) in (tuple, list) and value:
        items: list[object] = list(value)  # type: ignore[call-overload]
        parts = [*map(shown, items[:3]), *([f"{len(items) - 3} more"] if len(items) > 3 else [])]
        return f"({', '.join(parts)})" if isinstance(value, tuple) else f"[{', '.join(parts)}]"
    text = repr(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}... ({type(value).__name__})"
