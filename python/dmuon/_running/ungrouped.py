"""Warns of parameters that require a gradient and are in no group of the optimizer, so that no step updates them.

Warns too of parameters in a group that nothing seems to use.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.modules import module

from dmuon._running.runtime import Runtime
from dmuon._setup.place import clean_name
from dmuon._setup.shown import listed

_MESSAGE = (
    "dmuon: no group of the optimizer has %s: what came into the model after Muon was made, was frozen then, or was "
    "taken out of its group, is not updated by it. Give it to AdamW by opt.add_param_group({'params': [...]}), and a "
    "matrix back to Muon by opt.add_param_group({'params': [...], 'algorithm': 'muon'}); for Muon, change the model "
    "before dedicate_params. If another optimizer trains it, clip by torch.nn.utils.clip_grad_norm_: "
    "dmuon.clip_grad_norm_ leaves it out."
)
_FOREIGN = (
    "dmuon: a parameter of shape %s, which the model does not have and which opt.add_param_group gave to AdamW, had no "
    "gradient in its first step. If it was taken from the model before fully_shard, nothing trains it: take it from "
    "the model again. The model has %s of this shape."
)
_NAMED = 8  # parameters in a message
_models: Counter[Any] = Counter()  # made on a mesh, by its rows


class UngroupedParameters:
    """Parameters of one model that no group of its optimizer has."""

    def __init__(self, runtime: Runtime) -> None:
        _models[runtime.ranks.rows] += 1
        self._runtime, self._step = runtime, 0
        self._model = (runtime.ranks.rows, _models[runtime.ranks.rows])  # equal on all ranks
        self._others: dict[str, nn.Parameter] = {}  # seen in the last walk, but for those in `_trained`
        self._trained: set[torch.Tensor] = set()  # by a group, or by none and named in a warning
        self._named: set[torch.Tensor] = set()  # in a warning
        self._num_grouped = -1
        self._walked_at: int | None = None  # registrations before the last walk through the model
        self._added: list[torch.Tensor] = []  # to groups since the last step
        self._unsaid: tuple[int, list[str]] = (0, [])  # a step, and names that this rank saw in it

    def note_added(self, parameters: list[torch.Tensor]) -> None:
        """Notes parameters of a new group. The next step warns of those that the model lacks and that lack a gradient.

        An older PyTorch than 2.13 need not show which of them `fully_shard` has replaced.
        """
        self._added += parameters

    def _warn_of_foreign(self) -> None:
        idle = [p for p in self._added if p.requires_grad and p.grad is None]
        self._added = []
        if not idle or self._runtime.ranks.owner != 0:
            return
        self._runtime.show_placeholders()
        of_model = {p: clean_name(name) for name, p in self._runtime.model.named_parameters()}
        for parameter in idle:
            if parameter not in of_model:
                alike = [f"'{name}'" for p, name in of_model.items() if p.shape == parameter.shape]
                logging.getLogger("dmuon").warning(
                    _FOREIGN, tuple(parameter.shape), listed(alike, _NAMED) or "no parameter"
                )

    def warn(self, groups: list[dict[str, Any]]) -> None:
        """Ends a step. Names each parameter once that requires a gradient and that none of the groups has.

        Walks through the model in the first step, and in each step before which the number of parameters in groups has
        changed, or PyTorch has registered a module or a parameter anywhere. Slot 0 names what it sees. Other ranks wait
        for a step, then name what nobody has named.
        """
        self._warn_of_foreign()
        if self._num_grouped != (num_grouped := sum(len(group["params"]) for group in groups)):
            self._num_grouped, self._walked_at, self._trained = num_grouped, None, set()
        if self._walked_at != (registered := _registrations().total()):
            self._walked_at = registered
            self._runtime.show_placeholders()
            walked = dict(self._runtime.model.named_parameters())
            for some in (self._trained, self._named):
                some.intersection_update(walked.values())  # lets go of those that have left the model
            self._others = {name: p for name, p in walked.items() if p not in self._trained}
        new = {name: self._others.pop(name) for name in [name for name, p in self._others.items() if p.requires_grad]}
        self._trained.update(new.values())
        grouped = {p for group in groups for p in group["params"]} if new else set()
        lost = {name: p for name, p in new.items() if p not in grouped and p not in self._named}
        self._named.update(lost.values())
        seen = (self._step, [f"'{clean_name(name)}'" for name in lost])
        said, self._unsaid = (seen, (0, [])) if self._runtime.ranks.owner == 0 else (self._unsaid, seen)
        self._step += 1
        key = f"dmuon: in no group {zlib.crc32(f'{self._model} {said}'.encode())}"
        alone = self._runtime.ranks.size == 1
        if said[1] and (alone or dist.distributed_c10d._get_default_store().add(key, 1) == 1):
            logging.getLogger("dmuon").warning(_MESSAGE, listed(said[1], _NAMED))


@functools.cache
def _registrations() -> Counter[str]:
    """Counts what modules register from the first call on, in the process: PyTorch has no such hook of one model."""
    counted: Counter[str] = Counter()
    module.register_module_module_registration_hook(lambda *_: counted.update(["module"]))
    module.register_module_parameter_registration_hook(lambda *_: counted.update(["parameter"]))
    return counted
