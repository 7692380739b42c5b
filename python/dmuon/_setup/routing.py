"""Who updates a parameter, Muon or AdamW, and why."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._setup.place import Place, clean_name, holds_sentinel
from dmuon._setup.placeholder import OwnedTensor
from dmuon.views import View, experts, matrix

Select = Callable[[str, nn.Module, nn.Parameter], bool | View | None]

# What dedicate_params keeps of a model, in the model's own __dict__ so that both are freed together.
DEDICATION = "_dmuon_dedication"
_DEDICATES = "dedicate_params"  # the function that takes the matrices; the others only look at them
MATRIX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGE_TENSOR = 0.05  # of all trainable weights
_HEAD_NAMES = {"lm_head", "head", "output", "output_layer", "unembed", "embed_out", "classifier", "score"}
_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # of a snake_case or CamelCase name
_EMBEDDING_WORDS = ("emb", "wte", "wpe")
# Modules that multiply by their weight whatever they are called (a projection inside "patch_embed", say).
_PROJECTIONS = (nn.Linear, nn.MultiheadAttention)
_NO_EXPERTS = (nn.Conv1d, nn.ConvTranspose1d, nn.Bilinear)  # 3-D for another reason, whatever they are called


@dataclasses.dataclass
class Matrix:
    """A parameter: every place that holds it, and its values until owners take them."""

    name: str
    places: list[Place]  # several where it is tied
    parameter: nn.Parameter
    view: View | None = None  # what is orthogonalised of it; none: nothing

    @property
    def shape(self) -> torch.Size:
        """As the model has it: [rows, cols], unless it is looked at by a view."""
        return self.parameter.shape


@dataclasses.dataclass(frozen=True)
class Route:
    """One row of the routing table; `owner` and `unit` are known once Muon has planned."""

    name: str
    shape: tuple[int, ...]
    algorithm: str
    why: str
    owner: int | None = None
    unit: str | None = None
    view: View | None = None  # what Muon orthogonalises of it


class RoutingTable(tuple[Route, ...]):
    """A row for each parameter; prints as a table, with Muon's share of the weights and a note under it."""

    note: str

    def __new__(cls, rows: Iterable[Route] = (), note: str = "") -> RoutingTable:
        """`note` is printed at the end."""
        table = super().__new__(cls, rows)
        table.note = note
        return table

    def __str__(self) -> str:
        header = ("parameter", "shape", "updated by", "owner slot", "unit", "why")
        rows = [
            (
                route.name,
                "x".join(map(str, route.shape)) or "scalar",
                _updated_by(route),
                "" if route.owner is None else str(route.owner),
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

    def left_by_shape(self) -> list[Route]:
        """Large tensors that AdamW updates because they have three dimensions or more, as a stack of experts has."""
        total = sum(math.prod(route.shape) for route in self if route.algorithm != "frozen")
        return [
            route
            for route in self
            if route.algorithm == "adamw"
            and len(route.shape) >= 3
            and route.why == f"{len(route.shape)}-D"  # the user has not asked for it
            and math.prod(route.shape) > _LARGE_TENSOR * total
        ]


def _updated_by(route: Route) -> str:
    if route.view and route.view.sizes != (1, *route.shape):
        return f"Muon, {route.view}"
    return {"muon": "Muon", "adamw": "AdamW", "frozen": "nobody"}[route.algorithm]


def _unfit(parameter: nn.Parameter) -> str | None:
    """Why a parameter cannot be orthogonalised or trained, whatever its dimensions."""
    if parameter.numel() == 0:
        return "empty"
    if not parameter.requires_grad:
        return "frozen"
    if type(parameter) not in (nn.Parameter, DTensor):
        return f"a {type(parameter).__name__}"
    return None if parameter.dtype in MATRIX_DTYPES else f"dtype {parameter.dtype}"


def _output_heads(model: nn.Module) -> set[int]:
    """Heads that the model itself names, as transformers models do."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()


class _Rules:
    """The default routing, made once for a model."""

    def __init__(self, model: nn.Module) -> None:
        embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        weights = (module._parameters.get("weight") for module in embeddings)
        self._embeddings = {id(weight): weight for weight in weights if weight is not None}
        self._heads = _output_heads(model)
        self._by_shape = self._head_by_shape(model)

    def _head_by_shape(self, model: nn.Module) -> int | None:
        """The one linear layer, if it is the last, that has the shape of an embedding; for heads of no known name."""
        shapes = {tuple(weight.shape) for weight in self._embeddings.values()}
        linear = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear)]
        if self._heads or any(clean_name(path).rpartition(".")[2].lower() in _HEAD_NAMES for path, _ in linear):
            return None
        alike = [m.weight for _, m in linear if "weight" in m._parameters and tuple(m.weight.shape) in shapes]
        return id(alike[0]) if len(alike) == 1 and alike[0] is linear[-1][1].weight else None

    def decide(self, entry: Matrix) -> tuple[View | None, str]:
        """What Muon orthogonalises of a fit parameter by default, and why."""
        parameter, place = entry.parameter, entry.places[0]
        if parameter.ndim == 3 and min(parameter.shape[1:]) > 1 and _holds_experts(place):
            return experts(parameter), "a matrix for each expert"
        if parameter.ndim != 2:
            return None, f"{parameter.ndim}-D"
        reason = self._no_matrix(entry)
        return (None, reason) if reason else (matrix(parameter), "matrix")

    def _no_matrix(self, entry: Matrix) -> str | None:
        """Why a 2-D parameter is AdamW's."""
        parameter, place = entry.parameter, entry.places[0]
        path = clean_name(place.path)
        if id(parameter) in self._embeddings:
            return "embedding" if len(entry.places) == 1 else "tied to an embedding"
        last = clean_name(entry.places[-1].path).rpartition(".")[2]
        if not isinstance(place.module, _PROJECTIONS) and any(
            _names_embedding(name) for name in (last, place.attribute)
        ):
            return f"embedding, by its name '{entry.name}'"
        if id(parameter) in self._heads:
            return "output head, by get_output_embeddings()"
        if path.rpartition(".")[2].lower() in _HEAD_NAMES:
            return f"output head, by its name '{path}'"
        if id(parameter) == self._by_shape:
            return "output head, by its shape: an embedding's, and no other matrix has it"
        if "bias" in place.attribute.lower() and _is_of_experts(place):
            return "biases, one row an expert"
        return None


def _is_of_experts(place: Place) -> bool:
    """By the name of the module's class or of the module itself, as mixtures of experts have it."""
    names = (type(place.module).__name__, clean_name(place.path).rpartition(".")[2])
    return any("expert" in name.lower() for name in names) and not isinstance(place.module, _NO_EXPERTS)


def _holds_experts(place: Place) -> bool:
    return _is_of_experts(place) and not ("bias" in place.attribute.lower() or _names_embedding(place.attribute))


def _names_embedding(name: str) -> bool:
    """By a word that begins or ends as embeddings' do: "tok_embs" and "posEmb", not "ensemble"."""
    words = [word.lower().removesuffix("s") for word in _WORD.findall(name)]
    return any(
        "embed" in word or word.startswith(_EMBEDDING_WORDS) or word.endswith(_EMBEDDING_WORDS) for word in words
    )


def _find_parameters(model: nn.Module) -> list[Matrix]:
    """Every parameter once, in the order of named_parameters(), with all its aliases."""
    found: dict[int, Matrix] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            place = Place(path, module, attribute)
            found.setdefault(id(parameter), Matrix(place.name, [], parameter)).places.append(place)
    return list(found.values())


def _check_model(parameters: list[Matrix], model: nn.Module, function: str) -> None:
    once = "one call a model" if function == _DEDICATES else "the model as it is before dedicate_params"
    dedicated = f"is dedicated already. Expected: {once}."

    def refuse(name: str, problem: str) -> NoReturn:
        raise ValueError(f"{function}: model: '{name}' {problem}")

    for path, module in model.named_modules():
        if DEDICATION in module.__dict__ or holds_sentinel(module):
            refuse(path or "(root)", dedicated)
    for entry in parameters:
        parameter = entry.parameter
        if isinstance(parameter.data if type(parameter) is nn.Parameter else parameter, OwnedTensor):
            refuse(entry.name, dedicated)
        if isinstance(parameter, nn.UninitializedParameter):
            refuse(entry.name, "has no shape yet (its module is lazy). Run one forward pass first.")


def _check_hooks(entry: Matrix) -> None:
    parameter = entry.parameter
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"dedicate_params: model: '{entry.name}' has gradient hooks, which would never run: its gradient is summed "
            "up at the owner. Expected: a matrix without, or one that select() leaves to AdamW."
        )


def _ask(select: Select, entry: Matrix) -> tuple[View | None, str] | None:
    """The user's choice; None: by the rule."""
    try:
        answer = select(entry.name, entry.places[0].module, entry.parameter)
    except Exception as error:  # the user's own
        raise ValueError(
            f"dedicate_params: select: raised {type(error).__name__} for '{entry.name}': {error}"
        ) from error
    if answer is None:
        return None
    if not isinstance(answer, bool | View):
        raise ValueError(
            f"dedicate_params: select: expected True, False, a dmuon.View or None for '{entry.name}', got {answer!r}"
        )
    if answer is False:
        return None, "not selected by select()"
    shape = tuple(entry.shape)
    unfit = _unfit(entry.parameter)
    if answer is True and len(shape) != 2:
        unfit = unfit or f"{len(shape)}-D"
    if unfit:
        raise ValueError(
            f"dedicate_params: select: selected '{entry.name}'. Expected: a trainable parameter in float32, bfloat16 "
            "or float16, 2-D, or by a dmuon.View that says which matrices it consists of; got one of shape "
            f"{shape}: {unfit}."
        )
    view = matrix(entry.parameter) if answer is True else answer
    # A row must be whole: else one would be made of pieces of several.
    widths = {math.prod(shape[dim:]) for dim in range(1, len(shape))}
    if math.prod(view.sizes) != math.prod(shape) or view.cols not in widths:
        raise ValueError(
            f"dedicate_params: select: expected a view of all {math.prod(shape):,} elements of '{entry.name}', whose "
            f"rows are as long as its own, as its shape {shape} has them; got {view!r}"
        )
    return view, "selected by select()"


def route(model: nn.Module, select: Select | None, function: str = _DEDICATES) -> tuple[list[Matrix], RoutingTable]:
    """The matrices to dedicate, in module order, and the table of all parameters.

    Args:
        model: not dedicated yet.
        select: the user's choice.
        function: whose argument `model` is.

    Raises:
        ValueError: the model cannot be dedicated, or `select` chose what cannot be orthogonalised.
    """
    parameters = _find_parameters(model)
    _check_model(parameters, model, function)
    rules = _Rules(model)
    matrices: list[Matrix] = []
    rows: list[Route] = []
    for entry in parameters:
        choice = _ask(select, entry) if select else None
        unfit = _unfit(entry.parameter)
        entry.view, why = choice or ((None, unfit) if unfit else rules.decide(entry))
        if entry.view:
            if function == _DEDICATES:
                _check_hooks(entry)
            matrices.append(entry)
        algorithm = "muon" if entry.view else "adamw" if entry.parameter.requires_grad else "frozen"
        rows.append(Route(entry.name, tuple(entry.parameter.shape), algorithm, why, view=entry.view))
    return matrices, RoutingTable(rows)
