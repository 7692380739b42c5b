"""Descriptions, in a few words, of the values that users passed, for messages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn

_MOST = 80  # characters


def shown(value: object) -> str:
    """Describes a tensor by its shape and a module by its class, in tuples and lists too. Cuts other texts off."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if type(value) in (tuple, list) and value:
        items: list[object] = list(value)  # type: ignore[call-overload]
        words = listed([*map(shown, items)], 3)
        return f"({words})" if isinstance(value, tuple) else f"[{words}]"
    text = repr(value)
    return text if len(text) <= _MOST else f"{text[:_MOST]}... ({type(value).__name__})"


def listed(items: Sequence[str], most: int, between: str = ", ") -> str:
    """Returns the first items and the number of the others, such as "a, b and 3 more"."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return between.join(items[:most]) + more
