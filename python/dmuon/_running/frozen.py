"""Parameters that would silently stay as they are: frozen when the optimizer was made, or new in the model since."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from dmuon._running.runtime import Runtime
from dmuon._setup.place import clean_name
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.shown import listed

logger = logging.getLogger("dmuon")

_NAMED = 8  # parameters in a message
_num_models: Counter[tuple[tuple[int, ...], ...]] = Counter()  # that were ever made on a mesh, by its rows


class FrozenParameters:
    """Those of a model; leaves can be frozen and trained again."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._speaks = runtime.ranks.slot == 0
        self._frozen: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in runtime.model.named_parameters()
            if not parameter.requires_grad and not isinstance(parameter, OwnedTensor)
        }
        # By name: what the other warning is for, or has been warned of.
        self._known: dict[str, torch.Tensor] = dict(self._frozen)
        self._looked_at: int | None = None  # how much was registered when the model was walked through
        self._num_steps = 0
        self._unsaid: tuple[int, list[str]] | None = None  # a step, and what this rank has seen new in it
        _num_models[runtime.ranks.rows] += 1
        self._number = _num_models[runtime.ranks.rows]  # the same one on all ranks
        _watch_registrations()

    def warn_of_unfrozen(self, groups: list[dict[str, Any]]) -> None:
        """Slot 0 warns once of each that requires a gradient now and is in none of the groups."""
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if not unfrozen:
            return
        grouped = {id(parameter) for group in groups for parameter in group["params"]}
        for name in unfrozen:
            if id(self._frozen.pop(name)) not in grouped and self._speaks:
                logger.warning(
                    "dmuon: '%s' was frozen at first and requires a gradient now, but no group has it: it is not "
                    "updated. Give it to AdamW by opt.add_param_group({'params': [...]}), or unfreeze before "
                    "dedicate_params.",
                    name,
                )

    def warn_of_new(self, groups: list[dict[str, Any]]) -> None:
        """One warning of all that has come into the model since Muon, trains and is in none of the groups.

        The model is walked through in the first step, and in one before which PyTorch has registered a module or a
        parameter anywhere: whoever replaces or adds one does that, and steps do not, FSDP2's and dmuon's included.

        Slot 0 speaks of what it sees. Of what others see and slot 0 does not, the first of them speaks a step later,
        when slot 0 would have told.
        """
        self._num_steps += 1
        if self._unsaid is not None:
            self._tell(*self._unsaid)
            self._unsaid = None
        if self._looked_at == _registrations.count:
            return
        self._looked_at = _registrations.count
        self._runtime.show_placeholders()  # a backward that raised has left weights in their places
        grouped = {id(parameter) for group in groups for parameter in group["params"]}
        new = []
        for name, parameter in self._runtime.model.named_parameters():
            is_known = self._known.get(name) is parameter
            if is_known or id(parameter) in grouped or isinstance(parameter, OwnedTensor):
                continue
            self._known[name] = parameter
            if parameter.requires_grad:
                new.append(f"'{clean_name(name)}'")
            else:
                self._frozen[name] = parameter
        if new and self._speaks:
            self._tell(self._num_steps, new)
        elif new:
            self._unsaid = (self._num_steps, new)

    def _tell(self, step: int, new: list[str]) -> None:
        """Warns, unless another rank has told of it."""
        ranks = self._runtime.ranks
        if ranks.size > 1:
            seen = hashlib.sha256(f"{ranks.rows} {self._number} {step} {new}".encode()).hexdigest()
            if dist.distributed_c10d._get_default_store().add(f"dmuon: new parameters {seen}", 1) > 1:
                return
        logger.warning(
            "dmuon: no group of the optimizer has %s: what came into the model after Muon was made is not updated. "
            "Give it to AdamW by opt.add_param_group({'params': [...]}); for Muon, change the model before "
            "dedicate_params.",
            listed(new, _NAMED),
        )


class _Registrations:
    """Counts those of modules and parameters, in all modules of this process: PyTorch has no such hook of one model."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, *_: Any) -> None:
        """Counts one more; what is registered stays as it is."""
        self.count += 1


_registrations = _Registrations()


@functools.cache
def _watch_registrations() -> None:
    """From now on they are counted, as long as the process lives."""
    register_module_module_registration_hook(_registrations.note)
    register_module_parameter_registration_hook(_registrations.note)
