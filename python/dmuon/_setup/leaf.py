"""A leaf with its places, and the reasons that make it unfit for Muon."""

from __future__ import annotations

import dataclasses
import math
from itertools import groupby

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._setup.place import Place
from dmuon._setup.ranks import Ranks
from dmuon._setup.shown import shown
from dmuon._setup.slices import Slices, local_part
from dmuon.views import View

MATRIX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Leaf:
    """A leaf of the model: every place that holds it, and its values until owners have them.

    Routing makes a Leaf of every parameter and gives Muon those for which it finds views.
    """

    name: str
    places: list[Place]  # several if the leaf is tied
    parameter: nn.Parameter
    views: tuple[View, ...] = ()  # the matrices that Muon orthogonalises, one view after the other
    num_columns: int = 1  # columns of the mesh over which expert parallelism divides the first dimension; 1: undivided
    slices: Slices | None = None  # of tensor parallelism; None of a plain tensor, which all its ranks have whole

    @property
    def shape(self) -> torch.Size:
        """The shape in the model: [rows, cols], or any shape if a view reads it."""
        return self.parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the model, before and after Muon."""
        return self.parameter.dtype

    @property
    def cut(self) -> tuple[int, int] | None:
        """How tensor parallelism cuts the leaf, see `Slices.cut`. None if all ranks of a slot have all of it."""
        return None if self.slices is None else self.slices.cut

    def local(self) -> torch.Tensor:
        """Returns this rank's part of the leaf, before owners have the values."""
        return local_part(self.parameter)

    def own_experts(self, whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Returns this rank's experts if the stack is divided by experts, else all of the tensor."""
        return whole.chunk(self.num_columns)[ranks.shard] if self.num_columns > 1 else whole

    def part_of(self, whole: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Returns the part of a whole leaf that this rank's module has: its own experts, or its slice."""
        slices = self.slices
        return self.own_experts(whole, ranks) if slices is None else slices.of_rank(whole, ranks.tensor_rank)

    def unfit(self) -> str | None:
        """Returns a reason other than its dimensions why Muon cannot update the leaf; None if there is none."""
        if self.parameter.numel() == 0:
            return "empty"
        if not self.parameter.requires_grad:
            return "frozen"
        return self.unfit_tensor()

    def unfit_tensor(self) -> str | None:
        """Returns the last of these reasons: a class of tensors, or a dtype, that Muon does not update."""
        # Tensors of other classes may have no memory, or other values in it than they show.
        cls = type(self.local() if isinstance(self.parameter, DTensor) else self.parameter)
        if cls not in (nn.Parameter, torch.Tensor):
            return f"a {cls.__name__}"
        return None if self.parameter.dtype in MATRIX_DTYPES else f"dtype {self.parameter.dtype}"

    def check_views(self, answer: object, asked: str) -> tuple[View, ...]:
        """Returns the views in `answer`, the answer to `asked`. Joins neighbours that are alike.

        Raises:
            ValueError: `answer` is no view, or its views do not cover this leaf.
        """
        shape = tuple(self.shape)
        views = tuple(answer) if isinstance(answer, tuple | list) else (answer,)
        # A view's rows must be whole rows of the leaf.
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
    """Returns the views in words, "" for one matrix of the leaf's shape. Equal words of a leaf are equal views."""
    words = ", ".join(map(str, views))
    return "" if words == " x ".join(map(str, shape)) else words


def find_parameters(model: nn.Module) -> list[Leaf]:
    """Returns every parameter once, in the order of named_parameters(), with all its aliases."""
    found: dict[int, Leaf] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            place = Place(path, module, attribute)
            found.setdefault(id(parameter), Leaf(place.name, [], parameter)).places.append(place)
    return list(found.values())
