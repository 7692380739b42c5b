"""Placeholders: they stand in modules for weights that only their owners have whole."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from dmuon._setup.attributes import OWN
from dmuon._setup.ways_out import AT_OWNER, BETWEEN, HOOK_AT_OWNER, OUTSIDE, WAYS_OUT, of_caller
from dmuon._setup.written import written_by

_aten = torch.ops.aten


def _refusing(what: str, why: str = "") -> Any:
    def method(self: OwnedTensor, *_: Any) -> NoReturn:
        self._refuse(what, why=why)

    return method


class WeightSource(Protocol):
    """Gives a weight's values to operations that meet its placeholder inside a call of a module of the model."""

    def is_open(self) -> bool:
        """Returns True if such a call, or a backward, runs on this thread."""

    def begin(self) -> torch.Tensor:
        """Returns the weight, which is there until `end`."""

    def end(self) -> None:
        """The operation has read it."""

    def changed(self) -> None:
        """The operation has changed it, which becomes the weight. Collective."""


class OwnedTensor(torch.Tensor):
    """A weight, or its gradient, that this rank does not hold. It has the true shape and dtype, and no storage.

    Metadata, `detach` and a copy onto itself work. Inside the model's calls an operation gets a weight's values, and a
    view of a weight is a placeholder too. A gradient is a GradientTensor, with operations of its own. Everything else
    raises ValueError and names the way out, so that no clipping, averaging, initialising or saving skips a leaf in
    silence.
    """

    _name: str
    _source: WeightSource | None = None  # of a weight
    _views: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()  # what makes this view from the weight
    _identity: object  # only a placeholder's aliases share it
    _at_owner: str = AT_OWNER  # why a value is not here, and the way out

    @staticmethod
    def __new__(
        cls,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        layout: tuple[Sequence[int], int | torch.SymInt] | None = None,
    ) -> OwnedTensor:
        """`name` is fully qualified. `layout`: strides and offset, in elements, of a view."""
        strides, offset = layout or (None, None)
        # torch leaves this function untyped.
        tensor: OwnedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides, offset, dtype=dtype, device=device
        )
        tensor._name = name
        tensor._identity = object()
        return tensor

    # torch types its own as (Any, Any, Any, Any).
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo would trace the search for a reader, and fail
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        owned = next(_owned_in((*args, *(kwargs or {}).values())), None)
        if owned is None:  # the weight is deep in a structure that only the caller knows
            raise ValueError(f"dmuon: {func} on a weight that is whole only at its owner. {WAYS_OUT}")
        if func in (_aten.detach.default, _aten.alias.default) or (
            func is _aten._to_copy.default and _changes_nothing(owned, **(kwargs or {}))
        ):
            return owned._alias()
        if func is _aten.copy_.default and is_same(args[1], args[0]):
            return owned  # load_state_dict, after dmuon has read the loaded values
        if (result := owned._perform(func, args, kwargs or {})) is not NotImplemented:
            return result
        if owned._source is not None and torch.Tag.inplace_view not in func.tags and owned._source.is_open():
            return compute(func, args, kwargs or {})
        owned._refuse(str(func), _computes(func, args))

    def _perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Performs an operation that meets a gradient. Returns NotImplemented if there is none such."""
        return NotImplemented

    def _refuse(self, what: str, computes: bool = False, why: str = "") -> NoReturn:
        """Raises ValueError because of the operation `what`.

        `computes`: True if a layer would use its weight so. `why`: the reason and the way out, if the caller knows.
        """
        if what == "data_ptr":
            what += (
                " (is this Accelerate's prepare? call it once, with an optimizer of torch, then dmuon.prepare; a "
                "trainer's second train(), also by auto_find_batch_size, needs a new model and trainer)"
            )
        why = why or of_caller() or (OUTSIDE if computes and self._source is not None else self._at_owner)
        raise ValueError(f"dmuon: {what} on '{self._name}': {why}")

    def __getattr__(self, name: str) -> Any:
        """Names the way out in the error about an attribute that a DTensor has. hasattr returns False."""
        if hasattr(DTensor, name):
            raise AttributeError(f"dmuon: {name} on '{self._name}': {self._at_owner}")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def _alias(self) -> OwnedTensor:
        layout = (self.stride(), self.storage_offset())
        alias = type(self)(self._name, self.shape, self.dtype, self.device, layout)
        alias._identity, alias._source, alias._views = self._identity, self._source, self._views
        alias._at_owner = self._at_owner
        return alias

    def _of(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns this view of the weight."""
        return functools.reduce(lambda tensor, view: view(tensor), self._views, weight)

    def of_dtype(self, dtype: torch.dtype) -> OwnedTensor:
        """Returns a placeholder of the same weight with another dtype."""
        other = type(self)(self._name, self.shape, dtype, self.device)
        other._identity, other._source = self._identity, self._source
        return other

    @property
    def data(self) -> OwnedTensor:
        """Same as `detach`. Assigned values change the weight inside of the model's calls, and raise elsewhere."""
        return self._alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if is_same(value, self):
            return  # a move of the module to its own device assigns the same
        if self._source is None or not self._source.is_open() or value.shape != self.shape:
            self._refuse("assigning .data")
        with torch.no_grad():
            self.detach().copy_(value)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OwnedTensor('{self._name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    # No gradient arrives here for hooks, and there is no storage.
    register_hook = _refusing("register_hook", HOOK_AT_OWNER)
    register_post_accumulate_grad_hook = _refusing("register_post_accumulate_grad_hook", HOOK_AT_OWNER)
    share_memory_ = _refusing("share_memory_")
    untyped_storage = _refusing("untyped_storage")
    data_ptr = _refusing("data_ptr")
    numpy = _refusing("numpy")
    tolist = _refusing("tolist")
    __deepcopy__ = _refusing("copy.deepcopy")
    __reduce_ex__ = _refusing("pickling")


class TakenOutTensor(OwnedTensor):
    """Replaces a leaf as the module's attribute between dedicate_params and Muon. It has shape and dtype alone.

    Attributes that the user has set on the leaf, or sets here, are in `attributes`, which all places of a leaf share.
    """

    attributes: dict[str, Any]
    _at_owner = BETWEEN
    is_cuda = False  # else a move of recurrent layers would bring it into cuDNN's order

    def _refuse(self, what: str, computes: bool = False, why: str = "") -> NoReturn:
        raise ValueError(f"dmuon: {what} on '{self._name}': {self._at_owner}")

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(torch.Tensor, name):  # a change such as freezing would be lost
            self._refuse(f"setting .{name}")
        is_own = name == "attributes" or name in OwnedTensor.__annotations__
        (vars(self) if is_own else self.attributes)[name] = value

    def __getattr__(self, name: str) -> Any:
        if name in OWN or name not in (attributes := vars(self).get("attributes", {})):
            return super().__getattr__(name)
        return attributes[name]

    requires_grad = property(lambda _: True)  # as every leaf of dedicate_params
    requires_grad_ = _refusing("requires_grad_")


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the operation's result with the values of the weights in it. A view is a placeholder again.

    If the operation writes into weights, or into views of them, it changes them on all ranks.
    """
    if func.is_view and isinstance(args[0], OwnedTensor):
        return _view(args[0], lambda tensor: func(tensor, *args[1:], **kwargs))
    sources = dict.fromkeys(owned._source for owned in _owned_in((*args, *kwargs.values())) if owned._source)
    with contextlib.ExitStack() as stack:
        weights = {}
        for source in sources:
            weights[source] = source.begin().detach()
            stack.callback(source.end)

        def value(owned: OwnedTensor) -> torch.Tensor:
            assert owned._source is not None
            return owned._of(weights[owned._source])

        result = func(*tree_map_only(OwnedTensor, value, args), **tree_map_only(OwnedTensor, value, kwargs))
        changed = [value for value in written_by(func, args, kwargs) if isinstance(value, OwnedTensor)]
        for source in dict.fromkeys(owned._source for owned in changed if owned._source):
            source.changed()
    return changed[0] if changed and isinstance(result, torch.Tensor) else result


def _view(owned: OwnedTensor, view: Callable[[torch.Tensor], Any]) -> Any:
    """Returns what `view` returns, a tensor or a list of them, as placeholders."""
    like = torch.empty_strided(owned.shape, owned.stride(), dtype=owned.dtype, device="meta")
    shown = view(like)

    def placeholder(like: torch.Tensor, take: Callable[[Any], torch.Tensor]) -> OwnedTensor:
        layout = (like.stride(), like.storage_offset())
        made = OwnedTensor(owned._name, like.shape, like.dtype, owned.device, layout)
        made._source, made._views = owned._source, (*owned._views, lambda tensor: take(view(tensor)))
        return made

    if isinstance(shown, torch.Tensor):
        return placeholder(shown, lambda whole: whole)
    return [placeholder(part, operator.itemgetter(index)) for index, part in enumerate(shown)]


def _computes(func: Any, args: tuple[Any, ...]) -> bool:
    """True if the operation computes from a weight and other tensors, or makes a view of the weight."""
    others = any(isinstance(value, torch.Tensor) and not isinstance(value, OwnedTensor) for value in args)
    return not func._schema.is_mutable and (func.is_view or others)


def _changes_nothing(
    owned: OwnedTensor, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> bool:
    """True if a cast or move changes nothing. PyTorch moves from "cpu" to "cpu:0", which are equal here."""
    stays = device is None or device == owned.device or device.type == owned.device.type == "cpu"
    return stays and dtype in (None, owned.dtype)


def is_same(value: Any, other: Any) -> bool:
    """True if both are placeholders of one leaf of one model."""
    both = isinstance(value, OwnedTensor) and isinstance(other, OwnedTensor)
    return both and value._identity is other._identity


def _owned_in(values: Any) -> Iterator[OwnedTensor]:
    for value in values:
        if isinstance(value, OwnedTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _owned_in(value)
        elif isinstance(value, Mapping):
            yield from _owned_in(value.values())
