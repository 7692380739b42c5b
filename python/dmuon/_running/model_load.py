"""load_state_dict of a model whose leaves are owned."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from dmuon._running.hook_of_model import HookOfModel
from dmuon._running.runtime import Runtime
from dmuon._saving.fits import form, misfit
from dmuon._setup.agreement import agreement
from dmuon._setup.place import CHECKPOINT, joined
from dmuon._setup.placeholder import OwnedTensor, is_same
from dmuon._setup.shown import listed

_LOAD = "load_state_dict"
_KNOWN_HOOKS = ("dmuon.", "torch.distributed.")  # modules whose hooks leave the leaves' values unchanged


@dataclasses.dataclass
class _Load:
    """A load of the model in which hooks of its modules may still change values. Writes all of them at its end."""

    errors: list[str]  # torch's own list, a new one in each load
    values: dict[int, torch.Tensor]  # by leaf, as they are known so far
    problems: list[str] = dataclasses.field(default_factory=list)


class ModelLoad:
    """The hooks that load a model.

    1. The model's hook checks the values, and writes them before anything else has changed.
    2. If a module inside the model has hooks of the user's own, values below that module are known after them. Then
       all values are written at the end of the load.
    3. If a module of the model is loaded alone, its leaves are written one module at a time.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Registers the hooks. The model's leaves are placeholders by now."""
        self._runtime, model = runtime, runtime.model
        self._strict: bool | None = None  # `strict` while the model's own load_state_dict runs, else None
        self._load: _Load | None = None
        # A load of the model, or of a module around it, has a prefix for the model, and torch's list of errors.
        self._prefix, self._errors = "", list[str]()
        parts = [module for module in model.modules() if module is not model and module._parameters]
        of_part = HookOfModel(self._before_load_of_module)
        self._hooks = WeakKeyDictionary({part: part.register_load_state_dict_pre_hook(of_part).id for part in parts})
        self._hooks[model] = model.register_load_state_dict_pre_hook(self._before_load).id
        handle = model.register_load_state_dict_post_hook(self._after_load)
        model._load_state_dict_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
        model.load_state_dict = self._load_state_dict  # type: ignore[method-assign]

    def _load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the model's own method, whose hooks do not get `strict`."""
        model = self._runtime.model
        given = dict(zip(("strict", "assign"), args, strict=False)) | kwargs
        if given.get("assign"):
            raise ValueError(
                f"{_LOAD}: assign: expected False, got True: the optimizer would go on with the parameters of before. "
                "Expected: load_state_dict without assign, after to_empty if the model was on the meta device."
            )
        for module, hook in self._hooks.items():  # after hooks that were registered since
            module._load_state_dict_pre_hooks.move_to_end(hook)  # type: ignore[attr-defined]
        self._strict, self._load = given.get("strict", True), None
        try:
            return type(model).load_state_dict(model, state_dict, *args, **kwargs)
        except Exception as error:
            if self._load is not None:  # the other ranks wait at the end of the load
                with contextlib.suppress(ValueError), agreement(self._runtime.ranks, _LOAD):
                    raise error
            raise
        finally:
            self._strict = self._load = None
            self._runtime.let_gathers_wait()  # for AdamW's parameters, which torch has copied

    def _before_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._runtime.access.refuse_lost_load()
        self._load, self._prefix, self._errors = None, prefix, rest[-1]
        if self._runtime.leaves and not self._runtime.access.whole:
            late = _changed_later(module)
            taken = self._checked(module, state_dict, prefix, self._strict, late)
            if late:
                self._load = _Load(self._errors, taken)
            else:
                self._commit(taken)

    def _before_load_of_module(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes a module's values. If the model's own hook came first, its values are placeholders already."""
        held: dict[str, Any] = {
            f"{prefix}{name}": p for name, p in module._parameters.items() if isinstance(p, OwnedTensor)
        }
        self._runtime.access.refuse_lost_load(of_matrices=bool(held))
        given = {key: p for key, p in held.items() if key in state_dict and not is_same(state_dict[key], p)}
        if self._load is None or self._load.errors is not rest[-1]:
            if given:
                self._commit(self._checked(module, state_dict, prefix, None, ()))
            return
        for key, parameter in given.items():
            index, value = self._runtime.leaf_named[parameter._name], state_dict[key]
            if problem := self._runtime.shards.problem(index, value):
                self._load.problems.append(f"'{key}': {problem}.")
            else:
                self._load.values[index] = self._runtime.shards.cut(index, value)
            state_dict[key] = parameter

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        load, self._load = self._load, None
        if load is not None:
            self._commit_late(load, incompatible)
        if not self._errors and self._has_all_that_trains(module, incompatible.missing_keys):
            if self._runtime.access.whole:
                self._runtime.access.was_loaded = True
            else:
                self._runtime.access.torn.discard("model")

    def _has_all_that_trains(self, model: nn.Module, missing_keys: list[str]) -> bool:
        """True if each parameter that trains was loaded by one of its names."""
        missing = {_key(key, {}) for key in missing_keys}
        loaded: dict[torch.Tensor, bool] = {}
        for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False):
            if parameter.requires_grad:
                loaded[parameter] = loaded.get(parameter, False) or _key(f"{self._prefix}{name}", {}) not in missing
        return all(loaded.values())

    def _commit_late(self, load: _Load, incompatible: Any) -> None:
        with agreement(self._runtime.ranks, _LOAD) as facts:
            facts += [
                f"'{self._runtime.leaves[index].name}' {form(load.values[index])}" for index in sorted(load.values)
            ]
            facts.append(f"no {sorted(incompatible.missing_keys)}")
            if self._strict is not False:  # else a rank may have keys without a use, as rank 0 of a former head
                facts.append(f"{sorted(incompatible.unexpected_keys)} too")
            if problems := [*load.problems, *load.errors]:
                raise ValueError(f"{_LOAD}: {problems[0]} No matrix has been loaded.")
        self._commit(load.values)

    def _commit(self, loaded: dict[int, torch.Tensor]) -> None:
        """Writes the values, right after the check: nothing that may raise on some ranks alone comes between."""
        if loaded:
            self._runtime.shards.write_weights(loaded)
            self._runtime.publish(replaced=True)

    def _loaded_so_far(self, module: nn.Module) -> str:
        return " Nothing has been loaded." if module is self._runtime.model else ""

    def _checked(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, strict: bool | None, late: tuple[str, ...]
    ) -> dict[int, torch.Tensor]:
        """Moves the leaves' values out of the dict. Collective. Raises on all ranks before anything has changed.

        `late`: prefixes of names in the module that are not looked at.
        """
        self._runtime.meet(f"{_LOAD}()")
        taken: dict[int, torch.Tensor] = {}
        stand_ins: dict[str, OwnedTensor] = {}
        with agreement(self._runtime.ranks, _LOAD) as facts:
            missing, known, problems = [], set(), []
            late_leaves = {getattr(p, "_name", None) for name, p in _named_tensors(module) if name.startswith(late)}
            for name, parameter in _named_tensors(module):
                key = _key(f"{prefix}{name}", state_dict)
                known.add(key)
                if name.startswith(late):
                    continue
                if key not in state_dict or is_same(state_dict[key], parameter):
                    missing.append(key)
                    continue
                value = state_dict[key]
                if isinstance(parameter, OwnedTensor):
                    index = self._runtime.leaf_named[parameter._name]
                    problem = self._runtime.shards.problem(index, value)
                    # torch writes in the modules' order. So a leaf tied to a late module waits for its own module's
                    # hook. The model's own parameters come first anyway.
                    if "." not in name or parameter._name not in late_leaves:
                        taken[index], stand_ins[key] = value, parameter
                    facts.append(f"'{key}' {form(value)}")
                else:
                    problem = misfit(parameter, value, by_copy=True)
                if problem:
                    problems.append(f"{_LOAD}: '{key}': {problem}.{self._loaded_so_far(module)}")
            later = tuple(f"{prefix}{start}" for name in late for start in (name, name.replace(CHECKPOINT, "")))
            unknown = [
                key for key in state_dict if key.startswith(prefix) and key not in known and not key.startswith(later)
            ]
            facts.append(f"no {sorted(missing)}")
            if strict is None:  # of a part, or of a module around the model: torch itself refuses these later
                facts.append(f"{sorted(unknown)} too")
            facts.append(f"hooks that may change values of {list(late)}")
            if strict:
                _refuse_keys(missing, unknown)
            if problems:
                raise ValueError(problems[0])
        state_dict.update(stand_ins)
        return taken


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


def _changed_later(model: nn.Module) -> tuple[str, ...]:
    """Returns the prefixes of modules in the model that may change keys or values below.

    Such a module has a pre-hook of the user's, or a class with its own `_load_from_state_dict`, as BatchNorm has.
    """

    def changes(module: nn.Module) -> bool:
        hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
        known = all(str(getattr(hook, "__module__", "")).startswith(_KNOWN_HOOKS) for hook in hooks)
        return not known or type(module)._load_from_state_dict is not nn.Module._load_from_state_dict

    modules = model.named_modules(remove_duplicate=False)
    return tuple(f"{path}." for path, module in modules if path and changes(module))


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all parameters and persistent buffers, by every name."""
    yield from nn.Module.named_parameters(module, remove_duplicate=False)
    for path, part in module.named_modules(remove_duplicate=False):
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield joined(path, name), buffer


def _key(name: str, state_dict: dict[str, Any]) -> str:
    return name if name in state_dict else name.replace(CHECKPOINT, "")
