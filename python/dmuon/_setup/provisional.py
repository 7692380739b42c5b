"""A matrix of a model that was built on the meta device, between to_empty and Muon: kept by one rank alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

_aten = torch.ops.aten

# Take shape, dtype and device of a tensor and none of its values.
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


class InitialValues:
    """The values of one matrix until its owner takes them, and what ranks must have done alike to it."""

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, holder: int) -> None:
        """`holder`: the global rank that keeps them."""
        self.name, self.shape, self.dtype, self.holder = name, shape, dtype, holder
        self.base = torch.empty(shape, dtype=dtype, device="meta")  # real where the values are
        self.is_written = False
        self._history = hashlib.sha256()

    def note_write(self, func: Any, generator: torch.Generator | None, device: torch.device) -> None:
        """`func` changes values now; it draws numbers if it is random."""
        self.is_written = True
        self._history.update(str(func).encode())
        if is_random(func):
            self._history.update(random_state(generator, device))

    def history(self) -> str:
        """Equal on all ranks if these have done the same, from the same random states."""
        return self._history.hexdigest()


class Desk:
    """Where the matrix that is being initialised lies whole on every rank, until the next one's turn."""

    def __init__(self, here: int) -> None:
        """`here`: this rank, the global one."""
        self._here = here
        self.current: InitialValues | None = None

    def open(self, values: InitialValues, device: torch.device) -> None:
        """All of the matrix is about to be overwritten."""
        if self.current is values:
            return
        self.clear()
        self.current = values
        if values.base.is_meta:
            values.base = torch.empty_like(values.base, device=device)

    def clear(self) -> None:
        """From now on the holder alone has the values."""
        if self.current is not None and self.current.holder != self._here:
            self.current.base = self.current.base.to("meta")
        self.current = None


class ProvisionalTensor(torch.Tensor):
    """A matrix that is initialised as in one process, on all ranks alike, and kept by one rank.

    What overwrites it puts it on the desk: there it is whole on every rank, and everything works. Once another one
    lies there, an in-place operation runs at the holder alone; a random one draws its numbers on every rank, so that
    random states advance alike; views are views of the same values, and `empty_like`, `randn_like` and their like give
    plain whole tensors. Everything else needs values that are elsewhere, and raises ValueError.
    """

    _initial: InitialValues
    _desk: Desk

    @staticmethod
    def __new__(
        cls, values: InitialValues, desk: Desk, device: torch.device, layout: torch.Tensor | None = None
    ) -> ProvisionalTensor:
        """`device`: on which the values are, or would be; `layout`: of a view, on the meta device."""
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
        found = list(_provisional_in((args, kwargs.values())))
        first = found[0]
        if func in _LIKE and args[0] is first and len(found) == 1:
            given = {key: value for key, value in kwargs.items() if value is not None}
            return func(first._layout(), *args[1:], **{"device": first.device, **given})
        if func.is_view:
            return _mapped(func(first._layout(), *args[1:], **kwargs), first._view)
        written = [value for value in _written(func, args, kwargs) if isinstance(value, ProvisionalTensor)]
        for tensor in found:
            if tensor._initial is not first._initial:
                _refuse(first, f"{func} with the values of '{tensor._initial.name}'")
        if not written and first._desk.current is first._initial:
            return _run(func, args, kwargs)
        if not written:
            _refuse(first, str(func))
        is_whole = len(found) == 1 and first.numel() == first._initial.base.numel()
        if is_whole and func.overloadpacket in _OVERWRITING:
            first._desk.open(first._initial, first.device)
        first._initial.note_write(func, kwargs.get("generator"), first.device)
        _run(func, args, kwargs)
        return written[0]

    def _layout(self) -> torch.Tensor:
        base = self._initial.base.to("meta")
        return base.as_strided(self.size(), self.stride(), self.storage_offset())

    def _view(self, layout: torch.Tensor) -> ProvisionalTensor:
        if layout.dtype != self.dtype:
            _refuse(self, f"a view as {layout.dtype}")
        return ProvisionalTensor(self._initial, self._desk, self.device, layout)

    @property
    def data(self) -> ProvisionalTensor:
        """As `detach`; assigning it copies values."""
        return self._view(self._layout())

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.detach().copy_(value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ProvisionalTensor('{self._initial.name}', shape={tuple(self.shape)}, dtype={self.dtype})"


def is_random(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def random_state(generator: torch.Generator | None, device: torch.device) -> bytes:
    """From which numbers are drawn next."""
    if generator is not None:
        state = generator.get_state()
    elif device.type == "cpu":
        state = torch.get_rng_state()
    else:
        state = torch.get_device_module(device).get_rng_state(device)
    return state.numpy().tobytes()


def _refuse(tensor: ProvisionalTensor, what: str) -> NoReturn:
    raise ValueError(
        f"dmuon: {what} on '{tensor._initial.name}': until dmuon.Muon one rank alone keeps this weight. Expected: "
        "fully_shard before model.to_empty(...), and after it initialisation that finishes one weight before the next "
        "(nn.init, or copy_ of a whole tensor); or values that are loaded after Muon."
    )


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """On the values; where these are not, for its shapes' sake, or to draw the same random numbers."""
    draws = is_random(func)
    elsewhere = not draws and next(_provisional_in((args, kwargs.values())))._initial.base.is_meta

    def real(value: Any) -> Any:
        if not isinstance(value, ProvisionalTensor):
            return value.to("meta") if elsewhere and isinstance(value, torch.Tensor) else value
        if draws and value._initial.base.is_meta:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        return value._initial.base.as_strided(value.size(), value.stride(), value.storage_offset())

    try:
        return func(*_mapped(args, real), **{key: _mapped(value, real) for key, value in kwargs.items()})
    except NotImplementedError:
        if not elsewhere:  # there, shapes that depend on values cannot be checked
            raise


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation changes."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else [value]


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, change) for part in value)
    return change(value)


def _provisional_in(values: Any) -> Iterator[ProvisionalTensor]:
    for value in values:
        if isinstance(value, ProvisionalTensor):
            yield value
        elif isinstance(value, list | tuple | type({}.values())):
            yield from _provisional_in(value)
