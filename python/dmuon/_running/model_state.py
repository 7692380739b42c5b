"""state_dict of a model whose leaves are owned, with the values and forms of stock FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.nn as nn

from dmuon._running.hook_of_model import HookOfModel
from dmuon._running.model_load import ModelLoad
from dmuon._running.runtime import Runtime
from dmuon._saving.owned_shards import MASTER
from dmuon._setup.placeholder import OwnedTensor


class ModelState:
    """The hooks of one model. Outside `full_params` saving and loading the model, or a module of it, is collective.

    Every other hook finds values: the model's `state_dict` reads those of all leaves first, and the first hook of each
    module replaces its placeholders.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Registers the hooks. The model's leaves are placeholders by now."""
        self._runtime, model, leaves = runtime, runtime.model, runtime.leaves
        self._read: dict[int, torch.Tensor] | None = None  # by leaf, while the model's own state_dict runs
        for module in {model: None} | {place.module: None for leaf in leaves for place in leaf.places}:
            module.register_state_dict_pre_hook(HookOfModel(self._before_save))
            handle = module.register_state_dict_post_hook(HookOfModel(self._after_save))
            module._state_dict_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        model.state_dict = self._state_dict  # type: ignore[method-assign]
        model.__reduce_ex__ = _refuse_copy  # type: ignore[method-assign]
        ModelLoad(runtime)

    def _state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces the model's own method, to read all values at once."""
        leaves = range(0 if self._runtime.access.whole else len(self._runtime.leaves))
        self._read = self._values(leaves) if leaves else {}
        try:
            return type(self._runtime.model).state_dict(self._runtime.model, *args, **kwargs)
        finally:
            self._read = None

    def _before_save(self, *_: Any) -> None:
        if self._read is None:
            self._runtime.show_placeholders()

    def _after_save(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        known = module is not self._runtime.model and type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        keys = [f"{prefix}{name}" for name in module._parameters] if known else list(state_dict)
        owned = {key: state_dict[key] for key in keys if isinstance(state_dict.get(key), OwnedTensor)}
        if not owned:
            return  # for example inside full_params
        indices = {key: self._runtime.leaf_named[value._name] for key, value in owned.items()}
        values = self._read or self._values(sorted(set(indices.values())))
        state_dict.update({key: values[index] for key, index in indices.items()})

    def _values(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        """Returns leaves' values as shards, in the leaves' own dtypes. Collective."""
        self._runtime.meet("state_dict()")
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index in indices:
            by_dtype.setdefault(self._runtime.leaves[index].dtype, []).append(index)
        values: dict[int, torch.Tensor] = {}
        for dtype, alike in by_dtype.items():
            values |= zip(alike, self._runtime.shards.read(alike, MASTER, dtype), strict=True)
        return values


def _refuse_copy(protocol: Any) -> NoReturn:
    raise ValueError(
        "dmuon: copying or pickling a model whose matrices are at their owners, as copy.deepcopy, AveragedModel and "
        "torch.save(model) do. Expected: its state_dict(), for a model that is built anew or for torch.save; "
        "dmuon.Ema(model) for an average."
    )
