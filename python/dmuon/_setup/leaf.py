"""A leaf with its places, and whether it can be Muon's at all."""

from __future__ import annotations

import dataclasses
import math
from itertools import groupby

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._setup.place import Place
from dmuon._setup.shown import shown
from dmuon.views import View

MATRIX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Leaf:
    """A leaf of the model: every place that holds it, and its values until owners take them.

    Routing looks at every parameter of PyTorch's as one, and takes those of which it has views.
    """

    name: str
    places: list[Place]  # several where it is tied
    parameter: nn.Parameter
    views: tuple[View, ...] = ()  # what is orthogonalised of it, one after the other; none: nothing
    num_columns: int = 1  # of the mesh, each with a part of the first dimension, by expert parallelism; 1: all have all

    @property
    def shape(self) -> torch.Size:
        """As the model has it: [rows, cols], unless it is looked at by a view."""
        return self.parameter.shape

    def local(self) -> torch.Tensor:
        """What this rank has of it while it is a parameter with values."""
        parameter = self.parameter.detach()
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def unfit(self) -> str | None:
        """Why it cannot be orthogonalised or trained, whatever its dimensions."""
        if self.parameter.numel() == 0:
            return "empty"
        if not self.parameter.requires_grad:
            return "frozen"
        if type(self.parameter) not in (nn.Parameter, DTensor):
            return f"a {type(self.parameter).__name__}"
        return self.unfit_dtype()

    def unfit_dtype(self) -> str | None:
        """The last of these reasons."""
        return None if self.parameter.dtype in MATRIX_DTYPES else f"dtype {self.parameter.dtype}"

    def check_views(self, answer: object, asked: str) -> tuple[View, ...]:
        """The views that `answer` is, which `asked` wants; neighbours that are alike as one.

        Raises:
            ValueError: it is none, or they are not all of this leaf.
        """
        shape = tuple(self.shape)
        views = tuple(answer) if isinstance(answer, tuple | list) else (answer,)
        # A row must be whole: else one would be made of pieces of several.
        widths = {math.prod(shape[dim:]) for dim in range(1, len(shape))}
        fits = all(isinstance(view, View) and view.cols in widths for view in views)
        if not fits or sum(math.prod(view.sizes) for view in views) != math.prod(shape):
            raise ValueError(
                f"{asked}: expected a view of all {math.prod(shape):,} elements of '{self.name}', or several one after "
                f"the other, whose rows are as long as its own, as its shape {shape} has them; got {shown(answer)}"
            )
        return tuple(
            dataclasses.replace(view, count=sum(one.count for one in alike))
            for view, alike in groupby(views, key=lambda one: dataclasses.replace(one, count=1))
        )


def described(views: tuple[View, ...], shape: tuple[int, ...]) -> str:
    """The views in words, nothing where they are one matrix as it is: equal words of a leaf are equal views."""
    words = ", ".join(map(str, views))
    return "" if words == " x ".join(map(str, shape)) else words


def find_parameters(model: nn.Module) -> list[Leaf]:
    """Every parameter once, in the order of named_parameters(), with all its aliases."""
    found: dict[int, Leaf] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            place = Place(path, module, attribute)
            found.setdefault(id(parameter), Leaf(place.name, [], parameter)).places.append(place)
    return list(found.values())
