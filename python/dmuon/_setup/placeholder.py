"""Placeholders: they stand in modules for weights that only their owners have whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol

import torch
from torch.distributed.tensor import DTensor

from dmuon._setup.attributes import OWN

_aten = torch.ops.aten

_WAYS_OUT = (
    "Read or change weights inside `with dmuon.full_params(model, writeback=...)`; copy by model.state_dict(); average "
    "by dmuon.Ema(model); clip with dmuon.clip_grad_norm_(model, max_norm); train with dmuon.Muon(model)."
)


_OUTSIDE = (
    "it was used outside of the forward of its unit '{unit}', and its values are here inside of that alone. Expected: "
    "inside of it, by a call of the module that holds it; or that module as a unit of its own, by fully_shard on it "
    "before dmuon.Muon; or AdamW for it, by dedicate_params(select=...). To look at it: "
    "`with dmuon.full_params(model):`."
)
_BETWEEN = (
    "between dedicate_params and Muon no module holds its matrices. Expected: initialise and load weights before "
    "dedicate_params, or after Muon; of a model on the meta device, first fully_shard, then "
    "model.to_empty(device=...), then its initialisation, then Muon."
)


def _refusing(what: str) -> Any:
    def method(self: OwnedTensor, *_: Any) -> NoReturn:
        self._refuse(what)

    return method


class OwnedGradient(Protocol):
    """The operations on a gradient that this rank does not hold. All ranks call them alike."""

    def zero(self) -> None:
        """Sets the sum that the owner has accumulated to zero."""

    def norm(self) -> torch.Tensor:
        """Returns the 2-norm of the mean over all ranks, in a form that combines with norms of FSDP2's gradients."""

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies the gradient by a [] of its device."""

    def all_finite(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Averages the gradients of all parameters over the ranks, if that was not done.

        Returns:
            [] bool, True if every gradient of the model is finite, on every rank; and the gradients of other parameters
            that this rank lacked until now.
        """


class OwnedTensor(torch.Tensor):
    """A weight, or its gradient, that this rank does not hold. It has the true shape and dtype, and no storage.

    Metadata, `detach` and a copy onto itself work. A gradient also has the operations of OwnedGradient: `zero_`, the
    2-norm, `mul_` and `div_` with a number, and torch.amp.GradScaler's unscaling. Everything else raises ValueError
    and names the way out, so that no clipping, averaging, initialising or saving skips a leaf in silence.
    """

    _name: str
    _gradient: OwnedGradient | None
    _unit: str | None = None  # the name of a weight's unit, in whose forward the module has the values
    _identity: object  # only a placeholder's aliases share it

    @staticmethod
    def __new__(
        cls,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        gradient: OwnedGradient | None,
    ) -> OwnedTensor:
        """`name` is fully qualified. `gradient` has the operations if this is a gradient."""
        # torch leaves this function untyped.
        tensor: OwnedTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        tensor._name = name
        tensor._gradient = gradient
        tensor._identity = object()
        return tensor

    # torch types its own as (Any, Any, Any, Any).
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        owned = next(_owned_in((*args, *(kwargs or {}).values())), None)
        if owned is None:  # the weight is deep in a structure that only the caller knows
            raise ValueError(f"dmuon: {func} on a weight that is whole only at its owner. {_WAYS_OUT}")
        if func in (_aten.detach.default, _aten.alias.default) or (
            func is _aten._to_copy.default and _changes_nothing(owned, **(kwargs or {}))
        ):
            return owned._alias()
        if func is _aten.copy_.default and is_same(args[1], args[0]):
            return owned  # load_state_dict, after dmuon has read the loaded values
        if owned._gradient is not None and func in _OF_GRADIENTS:
            return _OF_GRADIENTS[func](owned, owned._gradient, *args, **(kwargs or {}))
        owned._refuse(str(func), _computes(func, args))

    def _refuse(self, what: str, computes: bool = False) -> NoReturn:
        """Raises ValueError because of the operation `what`. `computes`: True if a layer would use its weight so."""
        why = f"this weight is whole only at its owner. {_WAYS_OUT}"
        if "split" in what or "chunk" in what:
            what += " (is this fully_shard? call it before dmuon.Muon)"
        elif "view" in what:
            what += " (is this DistributedDataParallel? train the model without it: dmuon averages gradients)"
        if computes and self._unit is not None:
            why = _OUTSIDE.format(unit=self._unit)
        raise ValueError(f"dmuon: {what} on '{self._name}': {why}")

    def _alias(self) -> OwnedTensor:
        alias = type(self)(self._name, self.shape, self.dtype, self.device, self._gradient)
        alias._identity, alias._unit = self._identity, self._unit
        return alias

    @property
    def data(self) -> OwnedTensor:
        """Same as `detach`. Assigning other values raises ValueError, because training would not see them."""
        return self._alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not is_same(value, self):  # a move of the module to its own device assigns the same
            self._refuse("assigning .data")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OwnedTensor('{self._name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    # No gradient arrives here for hooks (`select` can give a matrix to AdamW), and there is no storage.
    register_hook = _refusing("register_hook")
    register_post_accumulate_grad_hook = _refusing("register_post_accumulate_grad_hook")
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
    is_cuda = False  # else a move of recurrent layers would bring it into cuDNN's order

    def _refuse(self, what: str, computes: bool = False) -> NoReturn:
        raise ValueError(f"dmuon: {what} on '{self._name}': {_BETWEEN}")

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(torch.Tensor, name):  # a change such as freezing would be lost
            self._refuse(f"setting .{name}")
        is_own = name == "attributes" or name in OwnedTensor.__annotations__
        (vars(self) if is_own else self.attributes)[name] = value

    def __getattr__(self, name: str) -> Any:
        if name in OWN or name not in (attributes := vars(self).get("attributes", {})):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return attributes[name]

    requires_grad = property(lambda _: True)  # as every leaf of dedicate_params
    requires_grad_ = _refusing("requires_grad_")


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


def _zero(owned: OwnedTensor, gradient: OwnedGradient, target: Any) -> Any:
    if isinstance(target, list | tuple):
        for tensor in target:
            tensor.zero_()
        return None
    gradient.zero()
    return owned


def _norm(owned: OwnedTensor, gradient: OwnedGradient, target: Any, order: float = 2.0, *rest: Any) -> torch.Tensor:
    if order != 2 or any(value not in (None, False) for value in rest):
        owned._refuse(f"a norm of order {order}, where the 2-norm alone is known")
    return gradient.norm()


def _scaling(verb: str, factor_of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def scale(owned: OwnedTensor, gradient: OwnedGradient, target: Any, number: Any) -> Any:
        if target is not owned:
            owned._refuse(f"{verb} by it")
        gradient.scale(factor_of(_number(owned, number)))
        return owned

    return scale


_mul = _scaling("multiplying", lambda factor: factor)
_div = _scaling("dividing", lambda divisor: divisor.double().reciprocal())


def _number(owned: OwnedTensor, factor: Any) -> torch.Tensor:
    """Returns the factor as [] on the gradient's device."""
    if isinstance(factor, DTensor):
        factor = factor.full_tensor()
    if not isinstance(factor, torch.Tensor):
        factor = torch.full((), factor, dtype=torch.float64, device=owned.device)
    if factor.numel() != 1:
        owned._refuse(f"scaling by a tensor of shape {tuple(factor.shape)}, where one number alone is known")
    number: torch.Tensor = factor.to(owned.device).reshape(())
    return number


def _each(change: Callable[[torch.Tensor, Any], Any]) -> Callable[..., None]:
    """Returns a function that changes a list of gradients one by one, as torch's foreach functions do."""

    def change_each(owned: OwnedTensor, gradient: OwnedGradient, targets: Any, factors: Any) -> None:
        for index, target in enumerate(targets):
            change(target, factors[index] if isinstance(factors, list | tuple) else factors)

    return change_each


def _unscale(
    owned: OwnedTensor,
    gradient: OwnedGradient,
    gradients: list[torch.Tensor],
    found: torch.Tensor,
    inverse: torch.Tensor,
) -> None:
    """Unscales gradients as torch.amp.GradScaler does. Sets `found` to 1 if a gradient is not finite."""
    finite, made = gradient.all_finite()  # the scaler could not list what is made now
    others = [*made, *(tensor for tensor in gradients if not isinstance(tensor, OwnedTensor))]
    if others:
        torch._amp_foreach_non_finite_check_and_unscale_(others, found, inverse)
    for tensor in gradients:
        if isinstance(tensor, OwnedTensor):
            assert tensor._gradient is not None
            tensor._gradient.scale(inverse)
    found.copy_(torch.where(finite, found, 1))


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


_OF_GRADIENTS: dict[Any, Callable[..., Any]] = {
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _zero,
    _aten.linalg_vector_norm.default: _norm,
    _aten.mul_.Tensor: _mul,
    _aten.mul_.Scalar: _mul,
    _aten.div_.Tensor: _div,
    _aten.div_.Scalar: _div,
    **{overload: _each(torch.Tensor.mul_) for overload in _overloads(_aten._foreach_mul_)},
    **{overload: _each(torch.Tensor.div_) for overload in _overloads(_aten._foreach_div_)},
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}


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
