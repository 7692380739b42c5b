"""Observes the forwards of an attention module, and computes the largest logit of each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from dmuon import _C
from dmuon._attention import logits
from dmuon._attention.step_clip import StepClip
from dmuon._running.structures import is_transformed
from dmuon._setup.replaced_method import ReplacedMethod

# The calls that take logits, or what they are made of.
_LARGEST: dict[Any, Callable[..., torch.Tensor | None]] = {
    F.scaled_dot_product_attention: logits.of_scaled_dot_product,
    F.multi_head_attention_forward: logits.of_multi_head,
    F.softmax: logits.of_softmax,
    torch.softmax: logits.of_softmax,
    torch.Tensor.softmax: logits.of_softmax,
}


class Observer:
    """Gives the largest logits of each training forward of a module to a StepClip.

    A training forward is one with `module.training` and gradients, outside of transforms of torch.func and of
    Ema.applied. A forward that activation checkpointing repeats in the backward counts if the first one had no
    gradients. The module runs without torch.compile, because Dynamo does not trace what sees its calls.
    """

    def __init__(self, module: nn.Module, name: str, num_heads: int, clip: StepClip) -> None:
        self._name, self._num_heads, self._clip = name, num_heads, clip
        self._had_gradients = False  # the last forward outside of a backward
        ReplacedMethod(module, "forward", self._forward)

    @torch.compiler.disable(reason="dmuon.QKClip observes attention")  # type: ignore[untyped-decorator]
    def _forward(self, inner: Callable[..., Any], module: nn.Module, *args: Any, **options: Any) -> Any:
        if not self._counts(module):
            return inner(*args, **options)
        with _Calls(self._num_heads) as calls:
            output = inner(*args, **options)
        for largest, shown_by in calls.found:
            self._clip.note(self._name, largest, shown_by)
        if not calls.found:
            self._clip.note_missing(self._name, calls.other or "no such call")
        return output

    def _counts(self, module: nn.Module) -> bool:
        if not module.training or is_transformed() or self._clip.is_averaged:
            return False
        if _C.in_backward():
            return not self._had_gradients
        self._had_gradients = torch.is_grad_enabled()
        return self._had_gradients


class _Calls(TorchFunctionMode):
    """The calls inside one forward that show logits of `num_heads` heads."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []  # with the calls' results
        self.other = ""  # a call that shows no logits, or of other heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if (largest_of := _LARGEST.get(func)) is not None:
            largest = None
            try:
                with torch.no_grad():
                    largest = largest_of(*args, **kwargs)
            except logits.NoLogitsError as error:
                self.other = f"{func.__name__} of {error}"
            if largest is not None and len(largest) == self.num_heads:
                self.found.append((largest, output[0] if isinstance(output, tuple) else output))
            elif largest is not None:
                self.other = f"{func.__name__} of {len(largest)}"
        return output
