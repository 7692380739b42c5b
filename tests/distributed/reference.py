"""Muon and AdamW on one process, as the formulas have them; shares no code with dmuon."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn as nn

SAFETY = 1.05
# The first five rows of Polar Express (arXiv 2505.16932), each damped.
_RAW = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
POLAR_EXPRESS = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in _RAW]
QUINTIC = [(3.4445, -4.7750, 2.0315)] * 5


def newton_schulz(x: torch.Tensor, rows: list[tuple[float, float, float]]) -> torch.Tensor:
    norm = x.double().norm()
    if norm == 0:
        return torch.zeros_like(x)
    x = (x.double() / norm).to(x.dtype)
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    for a, b, c in rows:
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if transposed else x


class ReferenceMuon:
    """Muon for the named parameters, torch.optim.AdamW for the others."""

    # By name: changes a matrix by its orthogonalised update, with its own state and hyperparameters.
    users: ClassVar[dict[str, Callable[[torch.Tensor, torch.Tensor, dict[str, Any], dict[str, Any]], None]]] = {}

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        rows: list[tuple[float, float, float]] = POLAR_EXPRESS,
        adamw_lr: float = 3e-4,
        cuts: Mapping[str, Callable[[torch.Tensor], list[torch.Tensor]]] | None = None,
        rule: str = "muon",
        beta2: float = 0.95,
        cautious_weight_decay: bool = False,
        adjust_lr_fn: str = "original",
    ) -> None:
        """`cuts`: by name, views of the matrices of which a parameter consists; else it is one matrix."""
        parameters = dict(model.named_parameters())
        self.matrices = {name: parameters[name] for name in names}
        self.cuts = cuts or {}
        self.own: dict[str, dict[str, Any]] = {}  # by name, what a matrix has in place of the common hyperparameters
        self.rule, self.beta2, self.cautious_weight_decay = rule, beta2, cautious_weight_decay
        self.adjust_lr_fn = adjust_lr_fn
        self.moments: dict[tuple[str, int], torch.Tensor] = {}  # of each matrix, for rules that have one
        self.users_states: dict[tuple[str, int], dict[str, Any]] = {}
        self.buffers = {name: torch.zeros_like(p) for name, p in self.matrices.items()}
        self.lr, self.weight_decay, self.momentum, self.nesterov, self.rows = (
            lr,
            weight_decay,
            momentum,
            nesterov,
            rows,
        )
        rest = [p for name, p in parameters.items() if name not in names and p.requires_grad]
        self.adamw = (
            torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=weight_decay) if rest else None
        )

    @torch.no_grad()
    def step(self) -> None:
        for name, p in self.matrices.items():
            if p.grad is None:
                continue
            parts = [self.cuts[name](of) if name in self.cuts else [of] for of in (p, p.grad, self.buffers[name])]
            for number, (matrix, gradient, buffer) in enumerate(zip(*parts, strict=True)):
                of = {**vars(self), **self.own.get(name, {}), "key": (name, number)}
                self._update(matrix, gradient, buffer, of)
        if self.adamw is not None:
            self.adamw.step()

    def _update(self, matrix: torch.Tensor, gradient: torch.Tensor, buffer: torch.Tensor, of: dict[str, Any]) -> None:
        buffer += (1 - of["momentum"]) * (gradient - buffer)
        update = gradient + of["momentum"] * (buffer - gradient) if of["nesterov"] else buffer
        orthogonal = newton_schulz(update.sign() if self.rule == "adamuon" else update, of["rows"])
        lr, (m, n) = of["lr"], matrix.shape
        ratio = math.sqrt(max(1.0, m / n)) if self.adjust_lr_fn == "original" else 0.2 * math.sqrt(max(m, n))
        if self.rule in self.users:
            state = self.users_states.setdefault(of["key"], {})
            return self.users[self.rule](matrix, orthogonal, state, {**of, "adjusted_lr": lr * ratio})
        change = self._changed(orthogonal, of)
        decayed = matrix * (matrix * change >= 0) if of["cautious_weight_decay"] else matrix
        matrix.copy_(matrix - lr * of["weight_decay"] * decayed - lr * ratio * change)

    def _changed(self, orthogonal: torch.Tensor, of: dict[str, Any]) -> torch.Tensor:
        """Returns the update of NorMuon or AdaMuon, of the variants that dmuon's headers name."""
        if self.rule == "muon":
            return orthogonal
        squares = orthogonal**2
        if self.rule == "normuon":
            squares = squares.mean(dim=1, keepdim=True)
        moment = self.moments.setdefault(of["key"], torch.zeros_like(squares))
        moment += (1 - of["beta2"]) * (squares - moment)
        change = orthogonal / (moment.sqrt() + 1e-8)
        if self.rule == "normuon":
            return change * orthogonal.norm() / max(float(change.norm()), 1e-8)
        return change * math.sqrt(min(orthogonal.shape)) / (change.norm() + 1e-8)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.matrices.values():
            if p.grad is not None:
                p.grad = None if set_to_none else torch.zeros_like(p.grad)
        if self.adamw is not None:
            self.adamw.zero_grad(set_to_none)
