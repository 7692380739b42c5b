"""Guards that refuse uses of a model between dedicate_params and Muon, while no module holds its leaves.

One of them stays: after Muon `fully_shard` raises.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY

from dmuon._setup.leaf import Leaf
from dmuon._setup.place import Place, State, held_inside
from dmuon._setup.replaced_method import ReplacedMethod

_ALONE = "To evaluate alone: no dedicate_params; a checkpoint of the model loads without it."


class Handle(Protocol):
    """Ends a guard."""

    def remove(self) -> None: ...


class _Refusal:
    """A hook that refuses what runs it, and that its module is pickled."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    def __call__(self, *_: Any) -> None:
        raise ValueError(f"dedicate_params: {self._problem}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # the leaves refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "dedicate_params: the model was pickled between dedicate_params and Muon, as torch.save(model) does. "
            "Expected: before dedicate_params; or after Muon its state_dict()."
        )


def guards(model: nn.Module, leaves: Iterable[Leaf]) -> list[Handle]:
    """Refuses forwards, state dicts and changes of leaves until Muon removes the handles that this returns."""
    refuse_forward = _Refusal(
        "a forward ran between dedicate_params and Muon. Expected: dedicate_params(model), fully_shard, "
        f"dmuon.Muon(model), then the first forward. {_ALONE}"
    )
    refuse_state = _Refusal(
        "a state dict was taken or loaded between dedicate_params and Muon. Expected: load weights before "
        "dedicate_params, or after Muon; or, where a program shards and then loads, dedicate_params and Muon after "
        "both. Under Accelerate: accelerator.prepare, then dmuon.prepare in place of both. "
        f"{_ALONE}"
    )
    handles: list[Handle] = []
    held: dict[nn.Module, list[Place]] = {}
    for leaf in leaves:
        for place in leaf.places:
            held.setdefault(place.module, []).append(place)
    for module in {model: None, **held}:  # the model itself first, before anything of it is loaded
        handles += [
            module.register_state_dict_pre_hook(refuse_state),
            module.register_load_state_dict_pre_hook(refuse_state),
            module.register_forward_pre_hook(refuse_forward),
        ]
    for module, places in held_inside(model, held):
        handles.append(ReplacedMethod(module, "requires_grad_", partial(_requires_grad, places)))
    for module, places in held.items():
        handles.append(ReplacedMethod(module, "register_parameter", partial(_register_parameter, places)))
    return handles


def _requires_grad(
    places: list[Place], inner: Callable[..., nn.Module], _module: nn.Module, *args: Any, **kwargs: Any
) -> nn.Module:
    """Replaces `requires_grad_`, which would skip leaves that were taken out."""
    taken_out = [place.name for place in places if place.state is State.TAKEN_OUT]
    if taken_out and not (args[0] if args else kwargs.get("requires_grad", True)):
        raise ValueError(
            f"dedicate_params: requires_grad_(False) between dedicate_params and Muon would not reach "
            f"'{taken_out[0]}', which no module holds now. Expected: freeze before dedicate_params, or after Muon."
        )
    return inner(*args, **kwargs)


def _register_parameter(
    places: list[Place], inner: Callable[..., None], module: nn.Module, name: str, param: nn.Parameter | None
) -> None:
    """Replaces `register_parameter`, which would only say of a leaf taken out that it exists."""
    for place in places:
        if place.attribute == name and name in module.__dict__:  # an assignment has removed it
            raise ValueError(
                f"dedicate_params: register_parameter between dedicate_params and Muon: '{place.name}' is Muon's "
                "already. Expected: the model as it is trained, with this parameter, at dedicate_params."
            )
    inner(name, param)


class _ComposableCalls(OrderedDict[str, Any]):
    """PyTorch's record of the composable functions called on a module.

    `fully_shard` looks itself up in the record of its module, and `replicate` looks for it, before all else.
    """

    def __contains__(self, function: object) -> bool:
        if function == "fully_shard":
            raise ValueError(
                "dmuon: fully_shard or replicate() after dmuon.Muon: its matrices are whole only at their owners by "
                "now. Expected: fully_shard before dmuon.Muon."
            )
        return super().__contains__(function)


def refuse_fully_shard(model: nn.Module, leaves: Iterable[Leaf]) -> None:
    """Lets `fully_shard` raise, from Muon on, before it has changed anything: it would meet a placeholder halfway.

    A model that was given to the older `replicate` raises in its first forward, by itself.
    """
    calls = {module: dict(vars(module).get(REGISTRY_KEY, {})) for module in model.modules()}
    if any("replicate" in of_module for of_module in calls.values()):
        return
    holding = {place.module for leaf in leaves for place in leaf.places}
    for module, of_module in calls.items():
        if "fully_shard" not in of_module and not holding.isdisjoint(module.modules()):
            vars(module)[REGISTRY_KEY] = _ComposableCalls(of_module)


def refuse_former_gradients(leaves: Sequence[Leaf]) -> None:
    """Lets a backward raise that gives a gradient to what was a leaf's parameter: the model may have kept it aside.

    The hooks live as long as these parameters do, which is mostly until `Muon` returns.
    """

    def hook(leaf: Leaf) -> Callable[[torch.Tensor], NoReturn]:
        name = leaf.name

        def refuse(parameter: torch.Tensor) -> NoReturn:
            parameter.grad = None
            raise ValueError(
                f"dmuon: a backward gives a gradient to the parameter that was '{name}' before dedicate_params, which "
                "nothing trains. Expected: that modules read their parameters anew in each forward, or keep them "
                "after dmuon.Muon."
            )

        return refuse

    for leaf in leaves:
        leaf.parameter.register_post_accumulate_grad_hook(hook(leaf))
