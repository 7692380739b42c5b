"""Inputs of a module's call, which has copies that share their memory: what it changes in them, the caller sees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
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
        if inputs := tensors_requiring_grad(arguments):
            self._pairs = list(zip(inputs, watch(inputs), strict=True))
            for given, watched in self._pairs:
                _share_python_side(given, watched)
            arguments, _ = _exchanged(arguments, self._pairs)
        self._arguments = arguments
        return arguments

    def outputs(self, module: str, output: Any) -> tuple[Any, list[torch.Tensor]]:
        """Returns what the caller gets for `output`, and all that the call has computed.

        The call may have returned a tensor, changed an input in place, or put a tensor into a list and the like. An
        input that it returns unchanged counts too, and stays a copy, as under `fully_shard`.

        Raises:
            ValueError: autograd would have forbidden a change in place. Names `module`.
        """
        if not self._pairs and not torch.is_grad_enabled():
            return output, []
        _, in_arguments = _exchanged(self._arguments, [(watched, given) for given, watched in self._pairs])
        pairs = [(watched, given) for given, watched in self._pairs if _take_change(module, given, watched)]
        output, in_output = _exchanged(output, pairs)
        changed = [given for _, given in pairs]
        as_before = {id(given) for given, _ in self._pairs} - set(map(id, changed))
        found = computed_tensors([*in_output, *in_arguments, *changed])
        return output, [tensor for tensor in found if id(tensor) not in as_before]


def _exchanged(value: Any, pairs: _Pairs) -> tuple[Any, list[torch.Tensor]]:
    """Returns `value` with the second of each pair in place of the first, and the tensors in it then."""
    new, tensors = {id(old): new for old, new in pairs}, []

    def exchange(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(new.get(id(tensor), tensor))
        return tensors[-1]

    return map_tensors(value, exchange), tensors


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Returns True for a class such as DTensor, which makes its own results and has its values elsewhere."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _share_python_side(given: torch.Tensor, watched: torch.Tensor) -> None:
    """Gives the call's tensor the class of the caller's, and lets both have the same attributes."""
    if _is_wrapper(given):
        return
    watched.__dict__ = given.__dict__
    if not isinstance(given, nn.Parameter):  # a class of leaves
        with contextlib.suppress(TypeError):  # no Python object changes to a class with __slots__
            watched.__class__ = type(given)


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
    history, what = watched.grad_fn, _moved(given, watched)
    if not what and (history is None or history.name() == _C.LEAVING_BACKWARD):
        if history is None:
            given.detach_()
        return False
    if what := what or _forbidden(given):
        raise ValueError(
            f"dmuon: '{module}' has changed an input in place, {what}. Expected: a change of a copy, such as x = x + y "
            "in place of x += y."
        )
    with _unsafe_preserve_version_counter(given):  # nothing is written that the call has saved
        _Changed.apply(given, watched)  # type: ignore[no-untyped-call]
    return True


def _moved(given: torch.Tensor, watched: torch.Tensor) -> str:
    """Says how the call has let its tensor show other memory than the caller's, if it has."""
    how = ""
    if given.is_nested or given.layout is not torch.strided or not watched.numel():  # none: it has freed its input
        return ""
    if (given.shape, given.stride()) != (watched.shape, watched.stride()):
        how = f"from shape {tuple(given.shape)} to {tuple(watched.shape)}"
    elif not _is_wrapper(given):
        is_alias = torch._C._is_alias_of(given, watched)  # type: ignore[attr-defined]
        if not is_alias or given.storage_offset() != watched.storage_offset():
            how = "to other memory (x.data = y)"
    return f"{how}, which the caller's tensor cannot follow" if how else ""


def _forbidden(given: torch.Tensor) -> str:
    """Says what `given` is, if autograd forbids to change that in place."""
    try:
        base = given._base if given._is_view() else given
        is_leaf = given.is_leaf or (base is not None and base.is_leaf and base.requires_grad)
        return "a leaf that requires a gradient, or a view of one" if is_leaf else ""
    except RuntimeError:  # autograd knows no history of such a view after a change
        return "a view of the kind that autograd lets nobody change, such as fully_shard, chunk and unbind make"
