"""Finds what an operation writes, by its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yields the arguments that an operation writes, those in lists one by one."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else [value]
