"""Parameters that were frozen when the optimizer was made: unfrozen later, they would silently stay as they are."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn as nn

from dmuon._setup.placeholder import OwnedTensor

logger = logging.getLogger("dmuon")


class FrozenParameters:
    """Those of a model; matrices of Muon can be frozen and trained again."""

    def __init__(self, model: nn.Module) -> None:
        self._frozen: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad and not isinstance(parameter, OwnedTensor)
        }

    def warn_of_unfrozen(self, groups: list[dict[str, Any]], speaks: bool) -> None:
        """Once for each that requires a gradient now and is in none of the groups; `speaks`: on this rank."""
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if not unfrozen:
            return
        grouped = {id(parameter) for group in groups for parameter in group["params"]}
        for name in unfrozen:
            if id(self._frozen.pop(name)) not in grouped and speaks:
                logger.warning(
                    "dmuon: '%s' was frozen when Muon was made and requires a gradient now, but no group has it: it is "
                    "not updated. Give it to AdamW by opt.add_param_group({'params': [...]}), or unfreeze before "
                    "dedicate_params.",
                    name,
                )
