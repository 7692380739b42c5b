"""Observes the forwards of an attention module, and computes the largest logit of each head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

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
        with _Calls(functools.partial(self._clip.note, self._name), self._num_heads) as calls:
            output = inner(*args, **options)
        unnoted: list[torch.Tensor | str] = [*calls.unnoted]
        if not calls.has_shown:
            unnoted.append(calls.other or "no such call")
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)] if unnoted else []
        for shown in unnoted:
            if not self._clip.note(self._name, shown, results):
                self._clip.note_at_once(self._name, shown)
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

    def __init__(self, note: Callable[[torch.Tensor, list[torch.Tensor]], bool], num_heads: int) -> None:
        super().__init__()
        self._note, self._num_heads = note, num_heads
        self.has_shown = False
        self.unnoted: list[torch.Tensor] = []  # largest logits of calls whose results need no gradient
        self.other = ""  # a call that shows no logits, or of other heads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (largest_of := _LARGEST.get(func)) is None:
            return func(*args, **kwargs)
        largest = None
        try:
            with torch.no_grad():
                largest = largest_of(*args, **kwargs)
        except logits.NoLogitsError as error:
            self.other = f"{func.__name__} of {error}"
        output = func(*args, **kwargs)
        if largest is not None and len(largest) == self._num_heads:
            self.has_shown = True
            if not self._note(largest, [output[0] if isinstance(output, tuple) else output]):
                self.unnoted.append(largest)
        elif largest is not None:
            self.other = f"{func.__name__} of {len(largest)}"
        return output
