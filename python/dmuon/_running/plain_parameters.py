"""The parameters that neither dmuon nor fully_shard manages: dmuon averages their gradients over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


class PlainParameters:
    """The plain parameters of a model and of AdamW's groups.

    Scales a rank's gradients: their mean over the ranks becomes the sum over the divide factor. It does so at the
    source, so that sums of micro-steps, norms and momentum all have one size.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], scale: float) -> None:
        """The gradients of `parameters` are not scaled before `add` names them."""
        self._parameters, self._scale = list(parameters), scale
        self._scaled: dict[torch.Tensor, Any] = {}  # handles of our hooks

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters)

    def add(self, parameters: Sequence[torch.Tensor]) -> None:
        """Adds parameters of a new group, and scales their gradients from now on."""
        known = set(map(id, self._parameters))
        self._parameters += [parameter for parameter in parameters if id(parameter) not in known]
        for parameter in parameters if self._scale != 1 else ():
            if parameter not in self._scaled:
                is_trainable = parameter.requires_grad
                parameter.requires_grad_(True)  # frozen parameters allow no hooks
                self._scaled[parameter] = parameter.register_hook(lambda gradient: gradient * self._scale)
                parameter.requires_grad_(is_trainable)
