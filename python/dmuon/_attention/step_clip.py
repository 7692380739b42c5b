"""The clip of a model at work: the maxima of a step, and what follows from them."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping, Sequence

import torch

from dmuon._attention.rows import HeadRows
from dmuon._running.runtime import Runtime
from dmuon._setup.slices import local_part
from dmuon.attention import Heads


class StepClip:
    """Collects the largest logits of a step, and scales rows by them. An AfterStep."""

    def __init__(self, heads: Mapping[str, Heads], rows: HeadRows | None, tau: float, runtime: Runtime) -> None:
        """`rows` None: clips nothing, so `tau` is inf."""
        self.heads, self.rows, self.tau = heads, rows, tau
        self._runtime = runtime
        self._sizes = [one.num_heads for one in heads.values()]
        # Of forwards whose backward has run since gradients were cleared; and until the next step, whatever runs.
        self._own = torch.full((sum(self._sizes),), -math.inf, dtype=torch.float64, device=runtime.device)
        self._kept = self._own.clone()
        self._last_backward = 0
        self._last = self._own.clone()
        # Since the last step: modules that showed no logits, with what was found; modules whose maxima the user gave.
        self._missing: dict[str, str] = {}
        self._given: set[str] = set()
        self._of_biases: list[torch.Tensor] = []

    def _by_module(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self.heads, values.split(self._sizes), strict=True))

    def last(self) -> dict[str, torch.Tensor]:
        """Returns the maxima of the last step, [heads] fp32 by module."""
        return self._by_module(self._last.float())

    @property
    def is_averaged(self) -> bool:
        """True inside Ema.applied. Its forwards show logits of other weights."""
        return self._runtime.access.is_averaged

    def note(self, name: str, maxima: torch.Tensor, shown_by: torch.Tensor) -> None:
        """Takes the largest logits, [heads], of one forward of a module. They count when its backward runs.

        Args:
            name: name of the module.
            maxima: [heads].
            shown_by: the result of the call that showed them. If it needs no gradient, they count at once.
        """
        if shown_by.requires_grad:
            # Weakly, because a loss that a program keeps has the hook.
            shown_by.register_hook(functools.partial(_note_backward, weakref.ref(self), name, maxima))
        else:
            self._add(self._kept, name, maxima)

    def note_backward(self, name: str, maxima: torch.Tensor) -> None:
        """Counts the largest logits of a forward whose backward runs."""
        engine = self._runtime.engine
        if self._last_backward != engine.num_backwards:
            self._last_backward = engine.num_backwards
            if engine.began_anew:  # gradients were cleared, by whatever means
                self._own.fill_(-math.inf)
        self._add(self._own, name, maxima)

    def _add(self, to: torch.Tensor, name: str, maxima: torch.Tensor) -> None:
        of_module = self._by_module(to)[name]
        of_module.copy_(torch.maximum(of_module, maxima.to(of_module)))

    def note_given(self, name: str, maxima: torch.Tensor) -> None:
        """Adds those that the user has found."""
        if not self.is_averaged:
            self._add(self._kept, name, maxima)
            self._given.add(name)

    def note_missing(self, name: str, found: str) -> None:
        """Notes that a forward of a module showed no logits, and what it showed."""
        self._missing[name] = found

    # ---- AfterStep ----

    def clear(self) -> None:
        self._own.fill_(-math.inf)

    def skip_unless(self, finite: torch.Tensor) -> None:
        for maxima in (self._own, self._kept):
            maxima.copy_(torch.where(finite, maxima, -math.inf))

    def forget(self) -> None:
        self._own.fill_(-math.inf)
        self._kept.fill_(-math.inf)
        self._missing.clear()
        self._given.clear()

    def problem(self) -> str | None:
        missing = {name: found for name, found in self._missing.items() if name not in self._given}
        self._missing.clear()
        for name, found in missing.items():
            return (
                f"QKClip: '{name}': expected a forward that calls scaled_dot_product_attention or softmax on "
                f"[batch, {self.heads[name].num_heads} heads, ...], got {found}. Use another implementation of "
                "attention (attn_implementation='sdpa' in Transformers), or call clip.observe(name, maxima) in each "
                "micro-step."
            )
        return None

    def settings(self) -> list[str]:
        return [f"QKClip's tau = {self.tau}"]

    def maxima(self) -> torch.Tensor:
        return torch.maximum(self._own, self._kept)

    def row_factors(
        self, maxima: torch.Tensor, applies: torch.Tensor, group_of: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        self._last.copy_(maxima)
        self.forget()
        if self.rows is None:
            return {}
        of_clipped = self._last
        if resting := self.rows.resting(group_of):
            of_clipped = of_clipped.clone()
            for name in resting:
                self._by_module(of_clipped)[name].fill_(-math.inf)
        found = self.rows.factors(of_clipped, self.tau, applies)
        owned, self._of_biases = found[: len(self.rows.parameters)], found[len(self.rows.parameters) :]
        return dict(zip(self.rows.parameters, owned, strict=True))

    def scale_others(self) -> None:
        for bias, factors in zip(self.rows.biases if self.rows else (), self._of_biases, strict=True):
            of_rank = local_part(bias)
            of_rank.mul_(factors.to(of_rank.device))  # FSDP2 may offload it


def _note_backward(clip: weakref.ref[StepClip], name: str, maxima: torch.Tensor, _gradient: torch.Tensor) -> None:
    if (lives := clip()) is not None:
        with torch.no_grad():
            lives.note_backward(name, maxima)
