"""state_dict and load_state_dict of a model whose matrices are owned: what stock FSDP2 would give and take."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon._saving.owned_shards import MASTER, OwnedShards
from dmuon._setup.agreement import agreement
from dmuon._setup.place import State
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.ranks import Ranks
from dmuon._setup.routing import Matrix

_WRAPPERS = "_checkpoint_wrapped_module."  # removed from keys by its own hooks
_LOAD = "load_state_dict"


class ModelState:
    """The hooks of one model. Outside `full_params` both directions are collective, of a module of the model too."""

    def __init__(
        self,
        model: nn.Module,
        matrices: list[Matrix],
        ranks: Ranks,
        shards: OwnedShards,
        rest: Callable[[], None],
        meet: Callable[[str], None],
        publish: Callable[[], None],
    ) -> None:
        """Registers them.

        Args:
            model: its matrices are placeholders from now on.
            matrices: of the model.
            ranks: of the mesh.
            shards: of the model's engine.
            rest: puts placeholders back where a backward that raised has left weights.
            meet: returns where all ranks have come to the call that it is given.
            publish: lets new masters count.
        """
        self._model = weakref.ref(model)
        self._matrices, self._ranks, self._shards, self._publish = matrices, ranks, shards, publish
        self._rest, self._meet = rest, meet
        self._index = {matrix.name: index for index, matrix in enumerate(matrices)}
        self._strict: bool | None = None  # of the load_state_dict that is under way; None: not the model's own
        self._loaded: dict[int, torch.Tensor] = {}
        holders = {place.module: place.path for matrix in matrices for place in matrix.places}
        for module, path in holders.items():
            module.register_state_dict_pre_hook(lambda *_: rest())
            module.register_state_dict_post_hook(self._after_save_of(path))
            if module is not model:
                module.register_load_state_dict_pre_hook(self._before_load_of_module)
        model.register_state_dict_post_hook(self._after_save_of(None))
        model.register_load_state_dict_pre_hook(self._before_load)
        model.register_load_state_dict_post_hook(self._after_load)
        model.load_state_dict = self._load_state_dict  # type: ignore[method-assign]

    # ---- saving ----

    def _after_save_of(self, path: str | None) -> Callable[..., None]:
        """Of a module that holds a matrix; None: of the model, where all are converted together."""

        def hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
            if path is None or not f".{prefix}".endswith(f".{path}."):
                self._convert(state_dict)

        return hook

    def _convert(self, state_dict: dict[str, Any]) -> None:
        owned = {key: value for key, value in state_dict.items() if isinstance(value, OwnedTensor)}
        if not owned:
            return  # inside full_params, say
        self._meet("state_dict()")
        by_dtype: dict[torch.dtype, set[int]] = {}
        for value in owned.values():
            by_dtype.setdefault(value.dtype, set()).add(self._index[value._name])
        saved: dict[int, torch.Tensor] = {}
        for dtype, found in by_dtype.items():
            indices = sorted(found)
            saved |= zip(indices, self._shards.give(indices, MASTER, dtype), strict=True)
        for key, value in owned.items():
            state_dict[key] = saved[self._index[value._name]]

    # ---- loading ----

    def _load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """nn.Module's, which does not tell its hooks whether it is strict."""
        model = self._model()
        assert model is not None
        self._strict = strict
        try:
            return type(model).load_state_dict(model, state_dict, strict=strict, assign=assign)
        finally:
            self._strict = None

    def _before_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        self._loaded = {}
        places = [place for matrix in self._matrices for place in matrix.places]
        if places and places[0].state is not State.WHOLE:
            self._loaded = self._checked(module, state_dict, prefix, self._strict)

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        loaded, self._loaded = self._loaded, {}
        self._commit(loaded)

    def _before_load_of_module(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Where the model's own hook has come first, placeholders stand for what it has taken."""
        held = {id(p) for p in module._parameters.values() if isinstance(p, OwnedTensor)}
        mine = (f"{prefix}{name}" for name, p in module._parameters.items() if id(p) in held)
        if any(not isinstance(state_dict.get(key), OwnedTensor) for key in mine if key in state_dict):
            self._commit(self._checked(module, state_dict, prefix, None))

    def _commit(self, loaded: dict[int, torch.Tensor]) -> None:
        if loaded:
            self._shards.take_weights(loaded)
            self._publish()

    def _checked(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, strict: bool | None
    ) -> dict[int, torch.Tensor]:
        """Takes the matrices' values out of the dict. Collective; raises on all ranks before anything has changed."""
        self._rest()
        self._meet(f"{_LOAD}()")
        taken: dict[int, torch.Tensor] = {}
        with agreement(self._ranks, _LOAD) as facts:
            missing = []
            for name, parameter in _named_tensors(module):
                key = _key(f"{prefix}{name}", state_dict)
                owned = isinstance(parameter, OwnedTensor)
                value = state_dict.get(key)
                if value is None or (owned and isinstance(value, OwnedTensor)):
                    missing += [key] if isinstance(parameter, nn.Parameter) else []
                    facts.append(f"no '{key}'")
                    continue
                if isinstance(parameter, OwnedTensor):
                    index = self._index[parameter._name]
                    problem = self._shards.problem(index, value)
                    taken[index] = value
                    facts.append(f"'{key}' {'sharded' if hasattr(value, 'placements') else 'whole'}")
                else:
                    problem = _misfit(parameter, value)
                if problem:
                    raise ValueError(f"{_LOAD}: '{key}': {problem}. Nothing has been loaded.")
            if missing and strict:
                raise ValueError(
                    f"{_LOAD}: no values for {_listed(missing)}. Expected: every parameter, or strict=False. Nothing "
                    "has been loaded."
                )
        for name, parameter in _named_tensors(module):
            key = _key(f"{prefix}{name}", state_dict)
            if isinstance(parameter, OwnedTensor) and key in state_dict:
                state_dict[key] = parameter
        return taken


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )


def _key(name: str, state_dict: dict[str, Any]) -> str:
    return name if name in state_dict else name.replace(_WRAPPERS, "")


def _misfit(parameter: torch.Tensor, value: Any) -> str | None:
    if not isinstance(value, torch.Tensor) or parameter.ndim == 0:
        return None  # the rest is torch's to judge
    if value.shape != parameter.shape:
        return f"expected shape {tuple(parameter.shape)}, got {tuple(value.shape)}"
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        return (
            "expected a DTensor, got a whole tensor, which set_model_state_dict of "
            "torch.distributed.checkpoint.state_dict cuts with StateDictOptions(full_state_dict=True)"
        )
    return None


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"'{name}'" for name in names[:5]) + more
