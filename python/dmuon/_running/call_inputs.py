"""Inputs of a module's call, which has copies that share their memory: what it changes in them, the caller sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from dmuon import _C
from dmuon._running.structures import computed_tensors, map_tensors, tensors_requiring_grad

_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class CallInputs:
    """The inputs of one call."""

    def __init__(self) -> None:
        self._arguments: Any = ()  # of the call, that autograd watches
        self._pairs: _Pairs = []  # tensors as the caller has them, and as the call has them

    def watched(self, arguments: Any, watch: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Any:
        """Returns the arguments with what `watch` returns in place of tensors that require a gradient.

        Lists and the like are the caller's own: until `outputs`, they have the call's tensors.
        """
        inputs = tensors_requiring_grad(arguments)
        if inputs:
            self._pairs = list(zip(inputs, watch(inputs), strict=True))
        self._arguments = _exchanged(arguments, self._pairs)
        return self._arguments

    def outputs(self, module: str, output: Any) -> tuple[Any, list[torch.Tensor]]:
        """Returns what the caller gets for `output`, and all that the call has computed.

        The call may have returned a tensor, changed an input in place, or put a tensor into a list and the like. An
        input that it returns unchanged counts too, and stays a copy, as under `fully_shard`.

        Raises:
            ValueError: autograd would have forbidden a change in place. Names `module`.
        """
        arguments = _exchanged(self._arguments, [(watched, given) for given, watched in self._pairs])
        pairs = [(watched, given) for given, watched in self._pairs if _take_change(module, given, watched)]
        output, changed = _exchanged(output, pairs), [given for _, given in pairs]
        as_before = {id(given) for given, _ in self._pairs} - set(map(id, changed))
        found = computed_tensors((output, arguments, changed))
        return output, [tensor for tensor in found if id(tensor) not in as_before]


def _exchanged(value: Any, pairs: _Pairs) -> Any:
    """Returns `value` with the second of each pair in place of the first."""
    new = {id(old): new for old, new in pairs}
    return map_tensors(value, lambda tensor: new.get(id(tensor), tensor)) if new else value


class _Changed(torch.autograd.Function):
    """An operation in place on `given` whose result is `watched`, which has the same memory."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, watched: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(given)
        ctx.is_view = given._is_view()
        return given

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        # Zeros are a part of the gradient of the view's base.
        return torch.zeros_like(gradient) if ctx.is_view else None, gradient


def _take_change(module: str, given: torch.Tensor, watched: torch.Tensor) -> bool:
    """Gives a tensor the new history if the call has changed it in place. Returns True then."""
    if watched.grad_fn is None:
        given.detach_()
        return False
    if watched.grad_fn.name() == _C.LEAVING_BACKWARD:
        return False
    try:
        base = given._base if given._is_view() else given
        is_leaf = given.is_leaf or (base is not None and base.is_leaf and base.requires_grad)
        what = "a leaf that requires a gradient, or a view of one" if is_leaf else ""
    except RuntimeError:  # autograd knows no history of such a view after a change
        what = "a view of the kind that autograd lets nobody change, such as fully_shard, chunk and unbind make"
    if (given.shape, given.stride()) != (watched.shape, watched.stride()):
        what = f"from shape {tuple(given.shape)} to {tuple(watched.shape)}, which the caller's tensor cannot follow"
    if what:
        raise ValueError(
            f"dmuon: '{module}' has changed an input in place, {what}. Expected: a change of a copy, such as x = x + y "
            "in place of x += y."
        )
    with _unsafe_preserve_version_counter(given):  # nothing is written that the call has saved
        _Changed.apply(given, watched)  # type: ignore[no-untyped-call]
    return True
