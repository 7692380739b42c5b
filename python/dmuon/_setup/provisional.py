"""Provisional parameters of a model that was built on the meta device, from to_empty to Muon."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from dmuon._setup.initial_values import InitialValues, is_random
from dmuon._setup.written import written_by

_aten = torch.ops.aten

# Operations that read shape, dtype and device of a tensor, but none of its values.
_LIKE = {
    getattr(_aten, name).default
    for name in (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
}
_OVERWRITING = {
    getattr(_aten, name)
    for name in (
        *("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"),
        *("exponential_", "log_normal_", "cauchy_", "geometric_"),
    )
}


class Desk:
    """Holds the parameter under initialisation, whole on every rank, until the next one's turn."""

    def __init__(self) -> None:
        self.current: InitialValues | None = None

    def open(self, values: InitialValues, device: torch.device, with_values: bool) -> None:
        """Puts a parameter on the desk. Collective if its values are to come."""
        if self.current is not values:
            self.clear()
            values.open(device, with_values)
            self.current = values

    def clear(self) -> None:
        """Empties the desk. Every rank stores its share of the parameter and frees the rest."""
        if self.current is not None:
            self.current.close()
        self.current = None


def _refuse(tensor: ProvisionalTensor, what: str) -> NoReturn:
    raise ValueError(
        f"dmuon: {what} on '{tensor._initial.name}': until dmuon.Muon one rank alone keeps a matrix. Expected: "
        "fully_shard before model.to_empty(...), and after it initialisation that finishes one weight before the next "
        "(nn.init, or copy_ of a whole tensor); values are loaded, and hooks registered, after Muon."
    )


def _refusing(what: str) -> Any:
    def method(self: ProvisionalTensor, *_: Any) -> NoReturn:
        _refuse(self, what)

    return method


class ProvisionalTensor(torch.Tensor):
    """A parameter that all ranks initialise alike, as one process would. One rank stores it, or each a shard.

    An operation that overwrites the parameter puts it on the desk. There it is whole on every rank, and everything
    works. Once another parameter lies there, any use brings a sharded one back. For a leaf:

    - An in-place operation runs at the holder alone.
    - A random one draws its numbers on every rank, so that random states advance alike.
    - Every other operation raises ValueError, because the values are elsewhere.

    Views share the values. `empty_like`, `randn_like` and similar functions return plain whole tensors.
    """

    _initial: InitialValues
    _desk: Desk

    @staticmethod
    def __new__(
        cls, values: InitialValues, desk: Desk, device: torch.device, layout: torch.Tensor | None = None
    ) -> ProvisionalTensor:
        """`device`: the device of the values. `layout`: the layout of a view, on the meta device."""
        like = values.base if layout is None else layout
        # torch leaves this function untyped.
        tensor: ProvisionalTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=device,
        )
        tensor._initial, tensor._desk = values, desk
        return tensor

    # torch types its own as (Any, Any, Any, Any).
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        values = tree_leaves((args, kwargs))
        found = [value for value in values if isinstance(value, ProvisionalTensor)]
        first = found[0]
        if func in _LIKE and args[0] is first and len(found) == 1:
            given = {key: value for key, value in kwargs.items() if value is not None}
            return func(first._layout(), *args[1:], **{"device": first.device, **given})
        if func.is_view:
            return tree_map(first._view, func(first._layout(), *args[1:], **kwargs))
        if torch.Tag.inplace_view in func.tags:
            _refuse(first, str(func))
        for tensor in found:
            if tensor._initial is not first._initial:
                _refuse(first, f"{func} with the values of '{tensor._initial.name}'")
        written = [value for value in written_by(func, args, kwargs) if isinstance(value, ProvisionalTensor)]
        first._prepare(func, len(found), bool(written))
        if written:
            is_new = first._overwrites(func, len(found))
            others = [value for value in values if not isinstance(value, ProvisionalTensor)]
            first._initial.note(func, others, first.device, is_new)
        result = _run(func, args, kwargs, first)
        if not written:
            return result
        return written[0] if len(func._schema.returns) == 1 else None

    def _overwrites(self, func: Any, num_operands: int) -> bool:
        """True if the operation overwrites all of the parameter."""
        is_whole = num_operands == 1 and self.numel() == self._initial.base.numel()
        return is_whole and func.overloadpacket in _OVERWRITING

    def _prepare(self, func: Any, num_operands: int, writes: bool) -> None:
        """Puts the parameter on the desk if possible. Raises ValueError if the operation needs that and it is not."""
        values, desk = self._initial, self._desk
        if desk.current is values:
            return
        if values.can_be_read:
            desk.open(values, self.device, with_values=values.is_written and not self._overwrites(func, num_operands))
        elif writes and (not values.is_written or self._overwrites(func, num_operands)):
            desk.open(values, self.device, with_values=False)
        elif not writes:
            _refuse(self, str(func))

    def _layout(self) -> torch.Tensor:
        base = self._initial.base.to("meta")
        return base.as_strided(self.size(), self.stride(), self.storage_offset())

    def _view(self, layout: torch.Tensor) -> ProvisionalTensor:
        if layout.dtype != self.dtype:
            _refuse(self, f"a view as {layout.dtype}")
        return ProvisionalTensor(self._initial, self._desk, self.device, layout)

    @property
    def data(self) -> ProvisionalTensor:
        """Same as `detach`. Assigning copies values."""
        return self._view(self._layout())

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            _refuse(self, f"assigning values of {value.dtype} and shape {tuple(value.shape)} to .data")
        with torch.no_grad():
            self.detach().copy_(value)

    register_hook = _refusing("register_hook")
    register_post_accumulate_grad_hook = _refusing("register_post_accumulate_grad_hook")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ProvisionalTensor('{self._initial.name}', shape={tuple(self.shape)}, dtype={self.dtype})"


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: ProvisionalTensor) -> Any:
    """Runs an operation on the values. Ranks without values run it for its shapes, or to draw the same numbers.

    All provisional arguments belong to one parameter. `first` is the first of them.
    """
    draws = is_random(func)
    elsewhere = not draws and first._initial.base.is_meta

    def real(value: Any) -> Any:
        if not isinstance(value, ProvisionalTensor):
            return value.to("meta") if elsewhere and isinstance(value, torch.Tensor) else value
        if draws and value._initial.base.is_meta:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        return value._initial.base.as_strided(value.size(), value.stride(), value.storage_offset())

    try:
        args, kwargs = tree_map(real, (args, kwargs))
        return func(*args, **kwargs)
    except NotImplementedError:
        if not elsewhere:  # ranks without values cannot check shapes that depend on values
            raise
