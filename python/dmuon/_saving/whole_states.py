"""Whole tensors in states: for trainers that save on the first rank alone, and load on every rank."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from dmuon._setup.place import CHECKPOINT, clean_name
from dmuon._setup.shown import shown
from dmuon._setup.wrappers import unwrapped


@contextlib.contextmanager
def whole_states(*objects: Any) -> Iterator[None]:
    """Lets the first rank save alone: inside, `state_dict()` sends nothing, and returns whole tensors on the CPU.

        with dmuon.whole_states(model, optimizer):  # on all ranks
            if torch.distributed.get_rank() == 0:
                trainer.save_checkpoint()  # calls model.state_dict() and optimizer.state_dict()

    Collective on entry, which gathers one tensor after the other. The first rank needs host memory for all of them. On
    other ranks the states are empty inside.

    Args:
        objects: models, optimizers, `dmuon.Ema`s: whatever has a `state_dict`, sharded by dmuon, by FSDP2 or not. The
            modules of a model count too.

    Raises:
        ValueError: an object has no `state_dict`; or as their `state_dict()` raises. Inside, for a module whose keys
            the model has renamed.
    """
    for number, given in enumerate(objects):
        if not callable(getattr(given, "state_dict", None)):
            raise ValueError(f"whole_states: objects[{number}]: expected one with a state_dict(), got {shown(given)}")
    with contextlib.ExitStack() as stack:
        for given in map(unwrapped, objects):
            held = _Held(given)
            parts = list(given.named_modules())[1:] if isinstance(given, nn.Module) else []
            states = [
                (given, held),
                *((module, functools.partial(held.of_part, path, module)) for path, module in parts),
            ]
            for holder, state in states:
                own = {key: method for key, method in vars(holder).items() if key == "state_dict"}
                holder.__dict__["state_dict"] = state
                stack.callback(vars(holder).update, own)  # callbacks run last to first
                stack.callback(vars(holder).pop, "state_dict", None)
        yield


class _Held:
    """In place of the method `state_dict` of an object: returns what that method returned, with whole tensors."""

    def __init__(self, given: Any) -> None:
        """Calls the method. Collective."""
        state = given.state_dict()
        self._versions = getattr(state, "_metadata", None)  # of modules, by path
        is_first = not dist.is_initialized() or dist.get_rank() == 0

        def whole(value: torch.Tensor) -> torch.Tensor | None:
            value = value.detach()
            full = value.full_tensor() if isinstance(value, DTensor) else value
            return full.to("cpu", copy=True) if is_first else None

        state = tree_map_only(torch.Tensor, whole, state)
        self._state = dict(state) if is_first else {}

    def of_part(
        self, path: str, module: nn.Module, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Likewise of a module inside."""
        found = copy.copy(self)
        own = f"{path}."
        starts = (own, own.replace(CHECKPOINT, ""), f"{clean_name(path)}.")
        below = next((start for start in starts if any(key.startswith(start) for key in self._state)), None)
        if below is None:
            if self._state and next(module.parameters(), None) is not None:
                raise ValueError(
                    f"whole_states: the model's state has no keys of its module '{path}'. Expected: its own."
                )
            below = own
        found._state = {key.removeprefix(below): value for key, value in self._state.items() if key.startswith(below)}
        versions = {f"{key}.": of for key, of in (self._versions or {}).items()}
        found._versions = {k.removeprefix(below)[:-1]: of for k, of in versions.items() if k.startswith(below)}
        return found(destination=destination, prefix=prefix)

    def __call__(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Like `nn.Module.state_dict`, which a module around this one calls, and like an optimizer's."""
        result: Any = destination
        if result is None:
            result = OrderedDict()
            result._metadata = OrderedDict()
        if self._versions is not None and hasattr(result, "_metadata"):
            result._metadata.update((f"{prefix}{path}".removesuffix("."), of) for path, of in self._versions.items())
        result.update((prefix + name, value) for name, value in self._state.items())
        return result  # type: ignore[no-any-return]
