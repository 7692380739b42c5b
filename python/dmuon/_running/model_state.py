"""state_dict and load_state_dict of a model whose leaves are owned, with the values and forms of stock FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from dmuon._running.runtime import Runtime
from dmuon._saving.owned_shards import MASTER
from dmuon._setup.agreement import agreement
from dmuon._setup.place import State, joined
from dmuon._setup.placeholder import OwnedTensor, is_same
from dmuon._setup.shown import listed

_WRAPPERS = "_checkpoint_wrapped_module."  # the wrapper's own hooks remove it from keys
_LOAD = "load_state_dict"


class ModelState:
    """The hooks of one model. Outside `full_params` saving and loading the model, or a module of it, is collective."""

    def __init__(self, runtime: Runtime) -> None:
        """Registers the hooks. The model's leaves are placeholders by now."""
        self._runtime, model, leaves = runtime, runtime.model, runtime.leaves
        self._index = {leaf.name: index for index, leaf in enumerate(leaves)}
        self._strict: bool | None = None  # `strict` while the model's own load_state_dict runs, else None
        self._is_saving = False  # True while the whole model is saved
        for module in {place.module: None for leaf in leaves for place in leaf.places}:
            if module is not model:
                module.register_state_dict_pre_hook(_function(self._before_save_of_module))
                module.register_state_dict_post_hook(_function(self._after_save_of_module))
                module.register_load_state_dict_pre_hook(self._before_load_of_module)
        model.register_state_dict_pre_hook(_function(self._before_save))
        model.register_state_dict_post_hook(_function(self._after_save))
        model.register_load_state_dict_pre_hook(self._before_load)
        model.load_state_dict = self._load_state_dict  # type: ignore[method-assign]
        model.__reduce_ex__ = _refuse_copy  # type: ignore[method-assign]

    # ---- saving ----

    def _before_save(self, *_: Any) -> None:
        self._runtime.show_placeholders()
        self._is_saving = True

    def _after_save(self, module: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
        self._is_saving = False
        self._convert(state_dict)  # for all modules together

    def _before_save_of_module(self, *_: Any) -> None:
        if not self._is_saving:
            self._runtime.show_placeholders()

    def _after_save_of_module(self, module: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
        if not self._is_saving:
            self._convert(state_dict)

    def _convert(self, state_dict: dict[str, Any]) -> None:
        owned = {key: value for key, value in state_dict.items() if isinstance(value, OwnedTensor)}
        if not owned:
            return  # for example inside full_params
        self._runtime.meet("state_dict()")
        by_dtype: dict[torch.dtype, set[int]] = {}
        for value in owned.values():
            by_dtype.setdefault(value.dtype, set()).add(self._index[value._name])
        saved: dict[int, torch.Tensor] = {}
        for dtype, found in by_dtype.items():
            indices = sorted(found)
            saved |= zip(indices, self._runtime.shards.read(indices, MASTER, dtype), strict=True)
        for key, value in owned.items():
            state_dict[key] = saved[self._index[value._name]]

    # ---- loading ----

    def _load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the model's own method, whose hooks do not get `strict`."""
        model = self._runtime.model
        given = dict(zip(("strict", "assign"), args, strict=False)) | kwargs
        if given.get("assign"):
            raise ValueError(
                f"{_LOAD}: assign: expected False, got True: the optimizer would go on with the parameters of before"
            )
        self._strict = given.get("strict", True)
        try:
            return type(model).load_state_dict(model, state_dict, *args, **kwargs)
        finally:
            self._strict = None

    def _before_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        self._runtime.refuse_lost_load()
        places = [place for leaf in self._runtime.leaves for place in leaf.places]
        if places and places[0].state is not State.WHOLE:
            self._commit(self._checked(module, state_dict, prefix, self._strict))

    def _before_load_of_module(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Loads a module. If the model's own hook came first, placeholders replace the values that it has loaded."""
        self._runtime.refuse_lost_load()
        held = {f"{prefix}{name}": p for name, p in module._parameters.items() if isinstance(p, OwnedTensor)}
        if any(not is_same(state_dict[key], p) for key, p in held.items() if key in state_dict):
            self._commit(self._checked(module, state_dict, prefix, None))

    def _commit(self, loaded: dict[int, torch.Tensor]) -> None:
        """Writes the values, right after the check: nothing that may raise on some ranks alone comes between."""
        if loaded:
            self._runtime.shards.write_weights(loaded)
            self._runtime.engine.publish()

    def _loaded_so_far(self, module: nn.Module) -> str:
        return " Nothing has been loaded." if module is self._runtime.model else ""

    def _checked(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, strict: bool | None
    ) -> dict[int, torch.Tensor]:
        """Moves the leaves' values out of the dict. Collective. Raises on all ranks before anything has changed."""
        self._runtime.meet(f"{_LOAD}()")
        taken: dict[int, torch.Tensor] = {}
        stand_ins: dict[str, OwnedTensor] = {}
        with agreement(self._runtime.ranks, _LOAD) as facts:
            missing, known, problems = [], set(), []
            for name, parameter in _named_tensors(module):
                key = _key(f"{prefix}{name}", state_dict)
                known.add(key)
                if key not in state_dict or is_same(state_dict[key], parameter):
                    missing.append(key)
                    continue
                value = state_dict[key]
                if isinstance(parameter, OwnedTensor):
                    index = self._index[parameter._name]
                    problem = self._runtime.shards.problem(index, value)
                    taken[index], stand_ins[key] = value, parameter
                    facts.append(f"'{key}' {'sharded' if isinstance(value, DTensor) else 'whole'}")
                else:
                    problem = _misfit(parameter, value)
                if problem:
                    problems.append(f"{_LOAD}: '{key}': {problem}.{self._loaded_so_far(module)}")
            unknown = [key for key in state_dict if key.startswith(prefix) and key not in known]
            facts.append(f"no {sorted(missing)}, and {sorted(unknown)} too")
            if strict and not _renames(module):
                _refuse_keys(missing, unknown)
            if problems:
                raise ValueError(problems[0])
        state_dict.update(stand_ins)
        return taken


def _function(method: Callable[..., None]) -> Callable[..., None]:
    """Makes a function of a method: torch sets an attribute on hooks, and methods allow none."""
    return lambda *args: method(*args)


def _refuse_copy(protocol: Any) -> NoReturn:
    raise ValueError(
        "dmuon: copying or pickling a model whose matrices are at their owners, as copy.deepcopy, AveragedModel and "
        "torch.save(model) do. Expected: its state_dict(), for a model that is built anew or for torch.save; "
        "dmuon.Ema(model) for an average."
    )


def _refuse_keys(missing: list[str], unknown: list[str]) -> None:
    unknown = [key for key in unknown if not key.endswith(_EXTRA_STATE_KEY_SUFFIX)]
    found = [
        f"{what} {listed([repr(key) for key in keys], 5)}"
        for what, keys in (("no values for", missing), ("no place for", unknown))
        if keys
    ]
    if found:
        raise ValueError(
            f"{_LOAD}: {'; '.join(found)}. Expected: a value for each parameter and no other, or strict=False. Nothing "
            "has been loaded."
        )


def _renames(module: nn.Module) -> bool:
    """True if hooks of modules, the user's or torch's own, may change keys. Then torch itself finds missing keys."""
    ours = ("dmuon.", "torch.distributed.")
    hooks = (hook for part in module.modules() for hook in part._load_state_dict_pre_hooks.values())
    return any(not str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(ours) for hook in hooks)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all parameters and persistent buffers, by every name."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield joined(path, name), buffer


def _key(name: str, state_dict: dict[str, Any]) -> str:
    return name if name in state_dict else name.replace(_WRAPPERS, "")


def _misfit(parameter: torch.Tensor, value: Any) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f"expected a tensor, got {type(value).__name__}"
    if value.shape != parameter.shape and not (parameter.ndim == 0 and value.shape == (1,)):
        return f"expected shape {tuple(parameter.shape)}, got {tuple(value.shape)}"
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
        return (
            "expected a DTensor, got a whole tensor, which set_model_state_dict of "
            "torch.distributed.checkpoint.state_dict cuts with StateDictOptions(full_state_dict=True)"
        )
    if isinstance(value, DTensor) and not isinstance(parameter, DTensor):
        return "expected a whole tensor, as no fully_shard manages it, got a DTensor"
    return None
