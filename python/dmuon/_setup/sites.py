"""The places of one unit where weights and placeholders take turns."""

from __future__ import annotations

import dataclasses

import torch.nn as nn
from torch.autograd import Variable

from dmuon import _C


@dataclasses.dataclass
class Site:
    """One place in a module where a weight and its placeholder take turns."""

    module: nn.Module
    attribute: str
    weight: nn.Parameter
    placeholder: nn.Parameter


class UnitSites:
    """Shows a unit's modules their weights while they compute.

    In a forward that is the time between the unit's hooks. In a backward it lasts from the first sign of the unit to
    the end: a checkpoint inside the unit's module, or one that is the unit's module, recomputes without passing
    our hooks.
    """

    def __init__(self, sites: list[Site]) -> None:
        self._sites = sites
        self._until_end_of_backward = False

    def show_weights(self) -> None:
        """Puts the weights in; in a backward until its end."""
        for site in self._sites:
            if site.weight.requires_grad != site.placeholder.requires_grad:
                site.weight.requires_grad_(site.placeholder.requires_grad)
            held = site.module._parameters.get(site.attribute)
            if held is not site.placeholder and held is not site.weight:
                raise ValueError(
                    f"dmuon: '{site.attribute}' of a {type(site.module).__name__} was replaced after dmuon.Muon, and "
                    "training would not see the new weight. Expected: write new values inside `with "
                    "dmuon.full_params(model, writeback=True)`."
                )
            site.module._parameters[site.attribute] = site.weight
        if _C.in_backward() and not self._until_end_of_backward:
            self._until_end_of_backward = True
            Variable._execution_engine.queue_callback(self.show_placeholders)

    def after_forward(self) -> None:
        """Puts the placeholders back, unless a backward still recomputes."""
        if not self._until_end_of_backward:
            self.show_placeholders()

    def show_placeholders(self) -> None:
        """Puts the placeholders back."""
        self._until_end_of_backward = False
        for site in self._sites:
            if site.module._parameters.get(site.attribute) is site.weight:
                site.module._parameters[site.attribute] = site.placeholder
