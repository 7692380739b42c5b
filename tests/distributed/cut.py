"""The reference optimizer for parameters that hold several matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from models import weights_of_plain
from reference import ReferenceMuon
from training import LR, WEIGHT_DECAY

MatricesOf = Callable[[str], Callable[[torch.Tensor], list[torch.Tensor]] | None]
LossOf = Callable[[nn.Module, int, int, int], torch.Tensor]  # of a step, a rank and their number


class Cut:
    """A model's weights with every matrix as a parameter of its own, and the reference optimizer on these."""

    def __init__(self, model: nn.Module, matrices_of: MatricesOf, adamw_eps: float = 1e-8, **muon: Any) -> None:
        """`matrices_of(name)` cuts a parameter, or is None for AdamW's; `muon`: options of the reference."""
        self._model, self._matrices_of = model, matrices_of
        self._cut = nn.ParameterDict()
        for name, parameter in model.named_parameters():
            for part, values in self._parts(name, parameter.detach()):
                self._cut[part] = nn.Parameter(values.clone())
        names = [part for part in self._cut if "/" in part]
        self._optimizer = ReferenceMuon(self._cut, names, LR, WEIGHT_DECAY, **muon)
        if self._optimizer.adamw is not None:
            self._optimizer.adamw.param_groups[0]["eps"] = adamw_eps

    def _parts(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        matrices, name = self._matrices_of(name), name.replace(".", "_")
        return [(f"{name}/{i}", part) for i, part in enumerate(matrices(tensor))] if matrices else [(name, tensor)]

    @torch.no_grad()
    def step(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                continue
            for part, gradient in self._parts(name, parameter.grad):
                self._cut[part].grad = gradient.clone()
            parameter.grad = None
        self._optimizer.step()
        for name, parameter in self._model.named_parameters():
            # Each element's place in the parts, by the same cut of the elements' numbers.
            places = torch.arange(parameter.numel()).view(parameter.shape)
            for part, where in self._parts(name, places):
                parameter.view(-1)[where.reshape(-1)] = self._cut[part].detach().reshape(-1)


def trained_alone(
    model: nn.Module, matrices_of: MatricesOf, loss_of: LossOf, steps: int, max_norm: float, **muon: Any
) -> list[dict[str, torch.Tensor]]:
    """The weights before the first step and after the last, on one process; gradients are clipped."""
    weights = [weights_of_plain(model)]
    cut = Cut(model, matrices_of, **muon)
    for step in range(steps):
        loss_of(model, step, 0, 1).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        cut.step()
    return [*weights, weights_of_plain(model)]
