"""Finds the attention modules of a model, and their heads."""

from __future__ import annotations

import torch.nn as nn

from dmuon import attention
from dmuon._setup.place import clean_name
from dmuon._setup.rules import qualified_name
from dmuon._setup.shown import shown
from dmuon.attention import Heads


def find_attention(model: nn.Module) -> dict[str, tuple[nn.Module, Heads]]:
    """Returns the attention modules that `dmuon.attention.by_class` knows, with their heads, by name.

    Raises:
        ValueError: there is none, or an entry of the table fails or returns something else.
    """
    found = {}
    for path, module in model.named_modules():
        keys = (key for cls in type(module).__mro__ for key in (cls, qualified_name(cls)))
        entry = next((key for key in keys if key in attention.by_class), None)
        if entry is None:
            continue
        name = clean_name(path)
        asked = f"QKClip: attention.by_class[{entry.__name__ if isinstance(entry, type) else repr(entry)}]"
        try:
            heads = attention.by_class[entry](module)
        except Exception as error:  # the user's own
            if isinstance(error, ValueError):
                words = f"{error}. An entry that returns None for a module leaves it out."
            else:
                words = f"raised {type(error).__name__}: {error}"
            raise ValueError(f"{asked}: '{name}': {words}") from error
        if heads is not None and not isinstance(heads, Heads):
            raise ValueError(f"{asked}: '{name}': expected dmuon.attention.Heads or None, got {shown(heads)}")
        if heads is not None:
            found[name] = module, heads
    if not found:
        classes = sorted(
            key.__name__ if isinstance(key, type) else key.rpartition(".")[2] for key in attention.by_class
        )
        raise ValueError(
            "QKClip: model: expected an attention module of a class in dmuon.attention.by_class, got none. It knows "
            f"{', '.join(classes)}; add yours."
        )
    return found
