"""What stands in a module for a weight that lives whole only at its owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

_WAYS_OUT = (
    "Read or change weights inside `with dmuon.full_params(model, writeback=...)`; clip with "
    "dmuon.clip_grad_norm_(model, max_norm); train with dmuon.Muon(model)."
)


def refuse(name: str, what: str) -> NoReturn:
    """Raises ValueError: `what` was tried on the placeholder of parameter `name`."""
    if "_amp_" in what:
        raise ValueError(
            f"dmuon: {what} on '{name}': torch.amp.GradScaler is not supported yet. Expected: training in "
            "bfloat16 or float32, which needs no loss scaling."
        )
    if "split" in what or "chunk" in what:
        what += " (is this fully_shard? call it before dmuon.Muon)"
    raise ValueError(f"dmuon: {what} on '{name}': this weight is whole only at its owner. {_WAYS_OUT}")


def _refusing(what: str) -> Any:
    def method(self: OwnedTensor, *_: Any) -> NoReturn:
        refuse(self._name, what)

    return method


class OwnedTensor(torch.Tensor):
    """A weight, or its gradient, that this rank does not hold: true shape and dtype, no storage.

    Metadata, `detach`, a copy onto itself and, of a gradient, `zero_` (which clears what the owner has accumulated)
    work. Everything else raises ValueError and names the way out, so that no clipping, averaging, initialising or
    saving passes over a matrix in silence.
    """

    _name: str
    _clear: Callable[[], None] | None

    @staticmethod
    def __new__(
        cls,
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        clear: Callable[[], None] | None,
    ) -> OwnedTensor:
        """`clear` is called by a gradient's `zero_`, None in a weight; `name` is the fully qualified name."""
        # torch leaves this function untyped.
        tensor: OwnedTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        tensor._name = name
        tensor._clear = clear
        return tensor

    # torch types its own as (Any, Any, Any, Any).
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        owned = next(_owned_in(args), None)
        if owned is None:
            refuse("?", str(func))
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return owned._alias()
        if func is torch.ops.aten.copy_.default and _is_of(args[1], args[0]):
            return owned  # load_state_dict, after what was loaded has been taken out
        if func is torch.ops.aten.zero_.default and owned._clear is not None:
            owned._clear()
            return owned
        if func is torch.ops.aten._foreach_zero_.default and owned._clear is not None:
            for tensor in args[0]:
                tensor.zero_()
            return None
        refuse(owned._name, str(func))

    def _alias(self) -> OwnedTensor:
        return OwnedTensor(self._name, self.shape, self.dtype, self.device, self._clear)

    @property
    def data(self) -> OwnedTensor:
        """As `detach`; assigning it raises ValueError, for training would not see the new values."""
        return self._alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        refuse(self._name, "assigning .data")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OwnedTensor('{self._name}', shape={tuple(self.shape)}, dtype={self.dtype})"

    # Gradients do not arrive here for hooks to see (`select` can leave a matrix to AdamW); there is no storage.
    register_hook = _refusing("register_hook")
    register_post_accumulate_grad_hook = _refusing("register_post_accumulate_grad_hook")
    share_memory_ = _refusing("share_memory_")
    untyped_storage = _refusing("untyped_storage")
    data_ptr = _refusing("data_ptr")
    __deepcopy__ = _refusing("copy.deepcopy")
    __reduce_ex__ = _refusing("pickling")


def _is_of(value: Any, owned: OwnedTensor) -> bool:
    return isinstance(value, OwnedTensor) and isinstance(owned, OwnedTensor) and value._name == owned._name


def _owned_in(values: Any) -> Iterator[OwnedTensor]:
    for value in values:
        if isinstance(value, OwnedTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _owned_in(value)
