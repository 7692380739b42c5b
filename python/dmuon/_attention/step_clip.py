"""The clip of a model at work: the maxima of a step, and what follows from them."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dmuon import _C
from dmuon._attention.rows import HeadRows
from dmuon._running.runtime import Runtime
from dmuon._setup.slices import local_part
from dmuon.attention import Heads


class _Came(NamedTuple):
    """What a forward of a module has shown, whose backward has run."""

    backward: int  # its number
    name: str
    shown: torch.Tensor | str


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
        self._newest = 0  # backward in `_own`
        self._came: list[_Came] = []  # in backwards, not in `_own` yet
        self._last = self._own.clone()
        # Likewise modules that showed no logits, with what was found. And modules whose maxima the user gave.
        self._own_missing: dict[str, str] = {}
        self._kept_missing: dict[str, str] = {}
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

    def note(self, name: str, shown: torch.Tensor | str, results: Iterable[torch.Tensor]) -> bool:
        """Takes what one forward of a module has shown. It counts when the backward of one of `results` runs.

        Args:
            name: name of the module.
            shown: the largest logits, [heads]; or what was found in their place.
            results: of the call that has shown it, or of the module.

        Returns:
            False if none of the results needs a gradient. Then the caller has other results, or `note_at_once`.
        """
        if not _C.in_backward():
            self._gather()
        # The base's node: a view loses its own if it is changed in place. A hook behind it, because the backward
        # begins with one before it.
        nodes = [(result if result._base is None else result._base).grad_fn for result in results]
        for node in (node for node in nodes if node is not None):
            # Weakly, because a loss that a program keeps has the hook.
            node.register_hook(functools.partial(_note_backward, weakref.ref(self), name, shown))
        return any(node is not None for node in nodes)

    def note_at_once(self, name: str, shown: torch.Tensor | str) -> None:
        """Counts what a forward without gradients has shown, until the next step."""
        if isinstance(shown, str):
            self._kept_missing[name] = shown
        else:
            self._add(self._kept, name, shown)

    def note_backward(self, name: str, shown: torch.Tensor | str) -> None:
        """Notes that the backward of a forward runs."""
        self._came.append(_Came(self._runtime.engine.backward_number, name, shown))

    def _gather(self) -> None:
        """Takes what has come in backwards, and drops that of gradients that were cleared, by whatever means."""
        last_anew, (came, self._came) = self._runtime.engine.last_anew, (self._came, [])
        if self._newest < last_anew:
            self._newest = last_anew
            self._own.fill_(-math.inf)
            self._own_missing.clear()
        for backward, name, shown in came:
            if backward < last_anew:
                continue
            self._newest = backward
            if isinstance(shown, str):
                self._own_missing[name] = shown
                continue
            if not shown.is_cpu:  # the forward may have been on another stream
                shown.record_stream(torch.accelerator.current_stream(shown.device))
            self._add(self._own, name, shown)

    def _add(self, to: torch.Tensor, name: str, maxima: torch.Tensor) -> None:
        of_module = self._by_module(to)[name]
        of_module.copy_(torch.maximum(of_module, maxima.to(of_module)))

    def note_given(self, name: str, maxima: torch.Tensor) -> None:
        """Adds those that the user has found."""
        if not self.is_averaged:
            self._add(self._kept, name, maxima)
            self._given.add(name)

    # ---- AfterStep ----

    def clear(self) -> None:
        self._came.clear()
        self._own.fill_(-math.inf)
        self._own_missing.clear()

    def skip_unless(self, finite: torch.Tensor) -> None:
        self._gather()
        for maxima in (self._own, self._kept):
            maxima.copy_(torch.where(finite, maxima, -math.inf))

    def forget(self) -> None:
        self.clear()
        self._kept.fill_(-math.inf)
        self._kept_missing.clear()
        self._given.clear()

    def problem(self) -> str | None:
        self._gather()
        # In one order on all ranks. Backwards have another one.
        missing = self._own_missing | self._kept_missing
        self._own_missing.clear()
        self._kept_missing.clear()
        for name, found in ((name, missing[name]) for name in self.heads if name in missing.keys() - self._given):
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
        self._gather()
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


def _note_backward(clip: weakref.ref[StepClip], name: str, shown: torch.Tensor | str, *_: Any) -> None:
    if (lives := clip()) is not None:
        lives.note_backward(name, shown)
