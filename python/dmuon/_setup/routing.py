"""Routing: decides for every parameter whether Muon or AdamW updates it, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch.nn as nn

from dmuon._setup.expert_parallel import note_columns
from dmuon._setup.leaf import Leaf, find_parameters
from dmuon._setup.place import holds_sentinel
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.ranks import Ranks
from dmuon._setup.routing_table import Route, RoutingTable
from dmuon._setup.rules import Rules
from dmuon._setup.sharded import managed_by_fsdp
from dmuon._setup.shown import shown
from dmuon._setup.tensor_parallel import note_slices
from dmuon._setup.views_for import KnownViews
from dmuon.views import View, matrix

Select = Callable[[str, nn.Module, nn.Parameter], bool | View | Sequence[View] | None]

# The key of a model's Dedication in the model's own __dict__, so that both are freed together.
DEDICATION = "_dmuon_dedication"
_DEDICATES = "dedicate_params"  # the function that takes leaves out; others only read them


def _check_model(parameters: list[Leaf], model: nn.Module, function: str) -> None:
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


def _check_hooks(entry: Leaf) -> None:
    parameter = entry.parameter
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise ValueError(
            f"dedicate_params: model: '{entry.name}' has gradient hooks, which would never run: its gradient is summed "
            "up at the owner. Expected: a matrix without, or one that select() leaves to AdamW."
        )


def _ask(select: Select, entry: Leaf, function: str) -> tuple[tuple[View, ...], str] | None:
    """Returns the user's choice and its reason, or None to go by the rule. Errors name `function`."""
    try:
        answer = select(entry.name, entry.places[0].module, entry.parameter)
    except Exception as error:  # the user's own
        raise ValueError(f"{function}: select: raised {type(error).__name__} for '{entry.name}': {error}") from error
    if answer is None:
        return None
    if not isinstance(answer, bool | View | tuple | list):
        raise ValueError(
            f"{function}: select: expected True, False, a dmuon.View, several of them or None for '{entry.name}', "
            f"got {shown(answer)}"
        )
    if answer is False:
        return (), "not selected by select()"
    shape = tuple(entry.shape)
    unfit = entry.unfit()
    if answer is True and len(shape) != 2:
        unfit = unfit or f"{len(shape)}-D"
    if unfit:
        raise ValueError(
            f"{function}: select: selected '{entry.name}'. Expected: a trainable parameter in float32, bfloat16 "
            "or float16, 2-D, or by a dmuon.View that says which matrices it consists of; got one of shape "
            f"{shape}: {unfit}."
        )
    views = entry.check_views(matrix(entry.parameter) if answer is True else answer, f"{function}: select")
    return views, select.why(entry.places[0]) if isinstance(select, KnownViews) else "selected by select()"


def route(
    model: nn.Module, select: Select | None, function: str = _DEDICATES, ranks: Ranks | None = None
) -> tuple[list[Leaf], RoutingTable]:
    """Returns the leaves to dedicate, in module order, and the table of all parameters.

    Args:
        model: a model that is not dedicated yet.
        select: the user's choice.
        function: the caller's name, for messages.
        ranks: those that will train the model, if it is known.

    Raises:
        ValueError: the model cannot be dedicated, or `select` or `views.by_class` chose a parameter that Muon cannot
            orthogonalise.
    """
    parameters = find_parameters(model)
    _check_model(parameters, model, function)
    rules, managed = Rules(model, function), managed_by_fsdp(model)
    if isinstance(select, KnownViews):
        select.require_all(parameters, function)
    if select is not None and not callable(select):
        raise ValueError(f"{function}: select: expected a function or None, got {shown(select)}")
    leaves: list[Leaf] = []
    rows: list[Route] = []
    for entry in parameters:
        choice = _ask(select, entry, function) if select else None
        misfit = False
        if choice is None and (unfit := entry.unfit()):
            misfit = unfit == entry.unfit_tensor() and bool(rules.decide(entry)[0])
            choice = (), unfit
        entry.views, why, unknown = (*choice, None) if choice else rules.decide(entry)
        note_slices(entry, managed, ranks, function)
        note_columns(entry, managed, function)
        if entry.views:
            if function == _DEDICATES:
                _check_hooks(entry)
            leaves.append(entry)
        algorithm = "muon" if entry.views else "adamw" if entry.parameter.requires_grad else "frozen"
        row = Route(entry.name, tuple(entry.shape), algorithm, why, views=entry.views, unknown=unknown, misfit=misfit)
        rows.append(row)
    return leaves, RoutingTable(rows)
