"""Clips the largest attention logit of each head, and shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn

from dmuon._attention.find import find_attention
from dmuon._attention.observer import Observer
from dmuon._attention.rows import HeadRows
from dmuon._attention.step_clip import StepClip
from dmuon._running.runtime import Runtime, runtime_of
from dmuon._setup.agreement import agreement
from dmuon._setup.option_values import real_number
from dmuon._setup.shown import shown


class QKClip:
    """Clips attention logits after each step of `dmuon.Muon`, as MuonClip does (Kimi K2, arXiv 2507.20534).

        clip = dmuon.QKClip(model, tau=100.0)  # after dmuon.Muon(model)
        loss.backward()
        optimizer.step()
        log(clip.max_logits)  # {"layers.0.self_attn": [heads], ...}

    S is the largest logit of a head: over all forwards whose gradients the step uses, over all ranks, and over the
    pairs of positions that the mask admits. If S > tau, the step also multiplies the head's rows of the query and key
    projections, so that the head's logits shrink by tau / S. A step that does not apply (`skipped_steps`) clips
    nothing. A module of which a step does not update all projections, or whose bias is frozen, is not clipped.

    Computes Q K' once more in each training forward. Sends no message: the maxima travel in the one that a step sends
    anyway, 8 bytes a head. Does not wait for the device. Has no state to save.
    """

    def __init__(self, model: nn.Module, tau: float = 100.0) -> None:
        """Finds the modules that `dmuon.attention.by_class` knows, and hooks them. Collective over the mesh.

        Args:
            model: a model with dmuon.Muon.
            tau: the largest logit that stays. With `math.inf` nothing is clipped, so heads need no rows that can be
                scaled, and all heads can be logged.

        Raises:
            ValueError: on all ranks, if any rank finds something wrong. No module is known, a projection is not Muon's
                or has other rows, a norm follows it, or tensor parallelism cuts the model.
        """
        runtime = runtime_of(model, "QKClip")
        runtime.access.refuse("QKClip()", whole=True)
        runtime.meet("QKClip()")  # reshards: a forward alone leaves FSDP2's biases whole
        with agreement(runtime.ranks, "QKClip") as facts:
            tau = _checked_tau(tau)
            _check_runtime(runtime)
            found = find_attention(runtime.model)
            heads = {name: of_module for name, (_, of_module) in found.items()}
            facts += [f"tau {tau}", *(f"the heads of '{name}': {of_module}" for name, of_module in heads.items())]
            rows = HeadRows(runtime, heads) if math.isfinite(tau) else None
        self._clip = StepClip(heads, rows, tau, runtime)
        runtime.engine.set_num_maxima(sum(of_module.num_heads for of_module in heads.values()))
        runtime.step_agreement.after_step = self._clip
        for name, (module, of_module) in found.items():
            Observer(module, name, of_module.num_heads, self._clip)

    @property
    def tau(self) -> float:
        """The largest logit that stays. Set it between steps, to the same number on all ranks."""
        return self._clip.tau

    @tau.setter
    def tau(self, tau: float) -> None:
        tau = _checked_tau(tau)
        if self._clip.rows is None and math.isfinite(tau):
            raise ValueError(f"QKClip: tau: expected inf, with which this QKClip was made, got {tau}")
        self._clip.tau = tau

    @property
    def max_logits(self) -> Mapping[str, torch.Tensor]:
        """The largest logits of the last step, [heads] fp32 by the module's name. Equal on all ranks.

        They are -inf before the first step, and if no rank ran the module. Does not wait for the device.
        """
        return self._clip.last()

    @torch.no_grad()
    def observe(self, name: str, maxima: torch.Tensor) -> None:
        """Takes the largest logits of a module, for attention that shows none by itself, such as FlexAttention.

        Call it once a forward, in each micro-step; behind the backward, if the program may drop a batch: they count in
        the next step. Not collective: a rank that did not run the module omits it.

        Args:
            name: name of the module, as in `max_logits`.
            maxima: [heads], with the module's scale and mask.

        Raises:
            ValueError: the name is unknown, or the shape is another.
        """
        heads = self._clip.heads.get(name) if isinstance(name, str) else None
        if heads is None:
            raise ValueError(f"QKClip.observe: name: expected one of {list(self._clip.heads)}, got {shown(name)}")
        is_tensor = isinstance(maxima, torch.Tensor) and maxima.is_floating_point() and not maxima.is_meta
        if not is_tensor or maxima.shape != (heads.num_heads,):
            of = f" in {maxima.dtype} on {maxima.device}" if isinstance(maxima, torch.Tensor) else ""
            raise ValueError(
                f"QKClip.observe: maxima: expected a floating tensor of shape ({heads.num_heads},) for '{name}', got "
                f"{shown(maxima)}{of}"
            )
        self._clip.note_given(name, maxima)


def _checked_tau(tau: Any) -> float:
    if (number := real_number(tau)) is None or not number > 0:
        raise ValueError(f"QKClip: tau: expected a positive number, got {shown(tau)}")
    return number


def _check_runtime(runtime: Runtime) -> None:
    if runtime.step_agreement.after_step is not None:
        raise ValueError("QKClip: model: expected one QKClip a model, got a second one")
    if runtime.ranks.tensor_parallel > 1:
        raise ValueError(
            f"QKClip: model: expected no tensor parallelism, got slices of {runtime.ranks.tensor_parallel} ranks: an "
            "owner has no whole rows to scale, and a rank sees the logits of its own heads alone"
        )
