"""The table of all parameters: which algorithm updates each, and why."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator

import torch.nn as nn

from dmuon._setup.leaf import described
from dmuon._setup.place import clean_name
from dmuon._setup.shown import listed
from dmuon.views import View

_LARGE = 0.05  # of all trainable weights
_MOST_NAMED = 5  # classes


@dataclasses.dataclass(frozen=True)
class Route:
    """One row of the routing table. `owner`, a slot of the mesh, and `unit` are None until Muon has planned."""

    name: str
    shape: tuple[int, ...]
    algorithm: str
    why: str
    owner: int | tuple[int, ...] | None = None  # several if the matrices are divided
    unit: str | None = None
    views: tuple[View, ...] = ()  # the matrices that Muon orthogonalises, one view after the other
    unknown: str | None = None  # its module's class, if AdamW updates it only because no rule knows that class
    misfit: bool = False  # True if AdamW updates it only because of its class or dtype


class RoutingTable(tuple[Route, ...]):
    """A row for each parameter. Prints as a table, with Muon's share of the weights and a note below."""

    note: str

    def __new__(cls, rows: Iterable[Route] = (), note: str = "") -> RoutingTable:
        """`note` prints at the end."""
        table = super().__new__(cls, rows)
        table.note = note
        return table

    def __str__(self) -> str:
        header = ("parameter", "shape", "updated by", "owner", "unit", "why")
        rows = [
            (
                route.name,
                _size(route),
                _updated_by(route),
                "" if route.owner is None else str(route.owner).strip("()"),
                "" if route.unit is None else route.unit or "(root)",
                route.why,
            )
            for route in self
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in [header, *rows]]
        return "\n".join([*lines, self._share(), *([self.note] if self.note else [])])

    def _share(self) -> str:
        sizes = Counter[str]()
        for route in self:
            sizes[route.algorithm] += math.prod(route.shape)
        total = sizes["muon"] + sizes["adamw"]
        return f"Muon updates {sizes['muon'] / max(total, 1):.1%} of {total:,} trainable weights, AdamW the others"

    def doubts(self) -> Iterator[str]:
        """Yields warnings of rows that the user may not intend."""
        if left := self._left_out():
            yield (
                f"AdamW updates {left}: no rule takes anything of such modules. If these hold matrices, say so of the "
                "class, as in dmuon.views.by_class[Class] = {'weight': dmuon.views.matrix}, or by select(), which "
                "returns True or a dmuon.View, such as dmuon.views.experts(parameter), or of a convolution "
                "dmuon.views.conv(parameter)."
            )
        if misfits := [route for route in self if route.misfit]:
            names = listed([f"'{route.name}'" for route in misfits], 1)
            yield (
                f"AdamW updates {names} ({misfits[0].why}), because Muon takes only plain tensors in fp32, bf16 and "
                "fp16. Convert such parameters before dedicate_params."
            )

    def _left_out(self) -> str | None:
        """Lists classes that no rule knows, if AdamW therefore updates many weights of these together; else None."""
        total = sum(math.prod(route.shape) for route in self if route.algorithm != "frozen")
        unknown: dict[str, list[Route]] = {}
        for route in self:
            if route.unknown is not None:
                unknown.setdefault(route.unknown, []).append(route)
        size_of = {name: sum(math.prod(route.shape) for route in routes) for name, routes in unknown.items()}
        if sum(size_of.values()) <= _LARGE * total:
            return None
        found = []
        for name in sorted(unknown, key=lambda name: -size_of[name])[:_MOST_NAMED]:
            largest_first = sorted(unknown[name], key=lambda route: -math.prod(route.shape))
            parameters = listed([f"'{route.name}' ({_size(route)})" for route in largest_first], 1)
            found.append(f"{parameters} of {name}")
        if len(unknown) > _MOST_NAMED:
            found.append(f"and others of {len(unknown) - _MOST_NAMED} more classes")
        return ", ".join(found)


def with_frozen(table: RoutingTable, model: nn.Module) -> Iterator[Route]:
    """Yields the rows of a table. Marks parameters as frozen that were frozen since."""
    frozen = {
        clean_name(name) for name, p in nn.Module.named_parameters(model, remove_duplicate=False) if not p.requires_grad
    }
    for row in table:
        is_frozen = row.algorithm == "adamw" and row.name in frozen
        yield dataclasses.replace(row, algorithm="frozen", why="frozen after dedicate_params") if is_frozen else row


def _size(route: Route) -> str:
    return "x".join(map(str, route.shape)) or "scalar"


def _updated_by(route: Route) -> str:
    if parts := described(route.views, route.shape):
        return f"Muon, {parts}"
    return {"muon": "Muon", "adamw": "AdamW", "frozen": "nobody"}[route.algorithm]
