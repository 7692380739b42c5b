"""Warns of parameters that no step updates: frozen when the optimizer was made, or new in the model since."""

from __future__ import annotations

import functools
import logging
import zlib
from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.nn.modules import module

from dmuon._running.runtime import Runtime
from dmuon._setup.place import clean_name
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.shown import listed

logger = logging.getLogger("dmuon")

_NAMED = 8  # parameters in a message
_count: Counter[Any] = Counter()  # of models made on a mesh, by the mesh's rows; of registrations in this process


class FrozenParameters:
    """Parameters of one model that no group of its optimizer has. Owned matrices are not among them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._frozen = {
            name: parameter
            for name, parameter in runtime.model.named_parameters()
            if not parameter.requires_grad and not isinstance(parameter, OwnedTensor)
        }
        self._known = dict(self._frozen)  # those that were frozen, and those that a warning has named
        self._walked_at: int | None = None  # registrations before the last walk through the model
        self._num_steps = 0
        self._unsaid: tuple[int, list[str]] | None = None  # a step, and new parameters that this rank saw in it
        _count[runtime.ranks.rows] += 1
        self._number = _count[runtime.ranks.rows]  # the same one on all ranks
        _count_registrations()

    def warn_of_unfrozen(self, groups: list[dict[str, Any]]) -> None:
        """Slot 0 warns once of each parameter that requires a gradient now and is in none of the groups."""
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        grouped = _ids(groups) if unfrozen else set()
        for name in unfrozen:
            if id(self._frozen.pop(name)) not in grouped and self._runtime.ranks.slot == 0:
                logger.warning(
                    "dmuon: '%s' was frozen at first and requires a gradient now, but no group has it: it is not "
                    "updated. Give it to AdamW by opt.add_param_group({'params': [...]}), or unfreeze before "
                    "dedicate_params.",
                    name,
                )

    def warn_of_new(self, groups: list[dict[str, Any]]) -> None:
        """Warns once of all parameters that came into the model after Muon, train and are in none of the groups.

        Walks through the model in the first step, and in each step before which PyTorch has registered a module or a
        parameter anywhere. Replacing or adding one registers it; steps of FSDP2 and dmuon register nothing.

        Slot 0 names the parameters that it sees. Other ranks wait for a step, then name those that nobody has named.
        """
        self._num_steps += 1
        seen, self._unsaid = self._unsaid, None
        if self._walked_at != _count["registrations"] and (new := self._new(groups)):
            self._unsaid = (self._num_steps, new)
        if self._runtime.ranks.slot == 0:
            seen, self._unsaid = self._unsaid, None
        if seen is not None and self._is_first(seen):
            logger.warning(
                "dmuon: no group of the optimizer has %s: what came into the model after Muon was made is not updated. "
                "Give it to AdamW by opt.add_param_group({'params': [...]}); for Muon, change the model before "
                "dedicate_params.",
                listed(seen[1], _NAMED),
            )

    def _is_first(self, seen: tuple[int, list[str]]) -> bool:
        """True if no other rank has named these parameters."""
        ranks = self._runtime.ranks
        key = f"dmuon: new parameters {zlib.crc32(f'{ranks.rows} {self._number} {seen}'.encode())}"
        return ranks.size == 1 or dist.distributed_c10d._get_default_store().add(key, 1) == 1

    def _new(self, groups: list[dict[str, Any]]) -> list[str]:
        self._walked_at = _count["registrations"]
        self._runtime.show_placeholders()
        grouped, new = _ids(groups), []
        for name, parameter in self._runtime.model.named_parameters():
            is_known = self._known.get(name) is parameter
            if is_known or id(parameter) in grouped or isinstance(parameter, OwnedTensor):
                continue
            self._known[name] = parameter
            if parameter.requires_grad:
                new.append(f"'{clean_name(name)}'")
            else:
                self._frozen[name] = parameter
        return new


def _ids(groups: list[dict[str, Any]]) -> set[int]:
    return {id(parameter) for group in groups for parameter in group["params"]}


@functools.cache
def _count_registrations() -> None:
    """Counts registrations as long as the process lives: PyTorch has no such hook of one model."""

    def count(*_: Any) -> None:
        _count["registrations"] += 1

    module.register_module_module_registration_hook(count)
    module.register_module_parameter_registration_hook(count)
