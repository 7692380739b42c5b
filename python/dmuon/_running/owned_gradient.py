"""A leaf's gradient, which its owner alone holds, and torch's operations on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate

from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.ways_out import GRADIENT_AT_OWNER

_aten = torch.ops.aten


class GradientTensor(OwnedTensor):
    """The placeholder of a leaf's gradient. Lists for torch's foreach functions may hold it beside DTensors."""

    _gradient: Gradient
    _at_owner = GRADIENT_AT_OWNER

    def _perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Performs `zero_`, the 2-norm, `mul_` and `div_` with a number, and GradScaler's unscaling."""
        operation = _OPERATIONS.get(func)
        return NotImplemented if operation is None else operation(self, self._gradient, *args, **kwargs)

    def _alias(self) -> OwnedTensor:
        alias = cast(GradientTensor, super()._alias())
        alias._gradient = self._gradient
        return alias

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `func`, of a foreach function apart for owned and other gradients.

        The class of a list's first tensor would dispatch the whole list, and a DTensor refuses all other classes.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "").startswith("_foreach_"):
                return _apart(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))


class Gradient:
    """A leaf's gradient. All ranks call its operations alike. Holds the runtime weakly.

    The engine holds the gradients' placeholders, and Python never collects a cycle through C++.
    """

    def __init__(self, runtime: Any, index: int) -> None:
        """`runtime` is a Runtime, whose module imports this one. `index` is the leaf's."""
        self._runtime: weakref.ref[Any] = weakref.ref(runtime)
        self._index = index

    def _alive(self) -> Any:
        runtime = self._runtime()
        if runtime is None:
            raise ValueError("dmuon: a gradient outlived its model. Expected: the model, for as long as it is used.")
        runtime.access.refuse_forked("a change of gradients")
        return runtime

    def zero(self) -> None:
        """Sets the gradient to zeros, if there is one."""
        if (runtime := self._runtime()) is not None:
            runtime.access.refuse_forked("a change of gradients")
            runtime.engine.zero_gradient(self._index)
            runtime.step_agreement.changed[f"{self._described(runtime)} set to zero"] = 1

    def norm(self) -> torch.Tensor:
        """Returns the 2-norm of the mean over all ranks, in a form that combines with norms of FSDP2's gradients."""
        runtime = self._alive()
        plain = runtime.plain.travelling if runtime.ranks.num_slots > 1 else ()  # equal on all ranks
        is_parallel = runtime.ranks.tensor_parallel > 1
        if plain and (runtime.fsdp_modules or (is_parallel and any(isinstance(p, DTensor) for p in plain))):
            raise ValueError(
                "dmuon: a norm of torch's with parameters of which fully_shard manages some and others not, or of "
                "tensor parallelism: torch adds up norms of one kind alone. Expected: "
                "dmuon.clip_grad_norm_(model, max_norm)."
            )
        norm: torch.Tensor = runtime.step_agreement.owned_norms()[self._index]
        if runtime.step_agreement.had_open_gradients:
            raise ValueError(
                "dmuon: a norm of torch's after a backward under no_sync, or through parameters of AdamW alone: "
                "gradients that no fully_shard manages have not been averaged over the ranks. Expected: "
                "dmuon.clip_grad_norm_(model, max_norm), or the last backward outside of no_sync."
            )
        mesh = runtime.shards.mesh_of_norms
        if mesh is None or not runtime.fsdp_modules:
            return norm
        together: torch.Tensor = DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return together

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies the gradient by a [] of its device."""
        runtime = self._alive()
        runtime.engine.settle_step()
        runtime.engine.scale_gradient(self._index, factor)

    def note_scaling(self, verb: str, number: Any) -> None:
        """Notes what scales the gradient, which must be alike on all ranks."""
        runtime = self._alive()
        by = "a tensor" if isinstance(number, torch.Tensor) else repr(number)
        runtime.step_agreement.changed[f"{verb} {self._described(runtime)} by {by}"] += 1

    def _described(self, runtime: Any) -> str:
        return f"the gradient of '{runtime.leaves[self._index].name}'"

    def all_finite(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Averages the gradients of all parameters over the ranks, if that was not done.

        Returns:
            [] bool, True if every gradient of the model is finite, on every rank; and the gradients of other parameters
            that this rank lacked until now.
        """
        runtime, problem = self._alive(), None
        groups = runtime.step_agreement.optimizer.param_groups
        if runtime.device.type != "cpu" and any(p.device.type == "cpu" for group in groups for p in group["params"]):
            problem = (
                "dmuon: GradScaler with parameters on the host, as by FSDP2's CPUOffloadPolicy: torch unscales their "
                "gradients by a factor that may not have arrived there yet. Expected: bfloat16, which needs no scaler."
            )
        finite = runtime.step_agreement.verdict(problem=problem).finite()
        if (after := runtime.step_agreement.after_step) is not None:
            after.skip_unless(finite)
        return finite, runtime.plain.made


def _zero(owned: OwnedTensor, gradient: Gradient, target: Any) -> Any:
    if isinstance(target, list | tuple):
        for tensor in target:
            tensor.zero_()
        return None
    gradient.zero()
    return owned


def _apart(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Calls a foreach function with the owned gradients, then with the others: the owned may refuse it."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    is_owned = [any(isinstance(value, OwnedTensor) for value in together) for together in zip(*lists, strict=True)]
    results: dict[int, torch.Tensor] = {}
    for owned in (True, False):
        if indices := [index for index, is_one in enumerate(is_owned) if is_one is owned]:
            part = [[arg[i] for i in indices] if isinstance(arg, list | tuple) else arg for arg in args]
            results |= zip(indices, func(*part, **kwargs) or (), strict=False)
    if not results:  # it has changed the first list
        return None
    return [results[index] for index in range(len(is_owned))]


def _norm(owned: OwnedTensor, gradient: Gradient, target: Any, order: float = 2.0, *rest: Any) -> Any:
    if order != 2 or any(value not in (None, False) for value in rest):
        owned._refuse(f"a norm of order {order} (expected the 2-norm of all elements)")
    if isinstance(target, list | tuple):
        return [torch.linalg.vector_norm(tensor) for tensor in target]
    return gradient.norm()


def _scaling(verb: str, factor_of: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def scale(owned: OwnedTensor, gradient: Gradient, target: Any, number: Any) -> Any:
        if target is not owned:
            owned._refuse(f"{verb} by it")
        gradient.scale(factor_of(_number(owned, number)))
        gradient.note_scaling(verb, number)
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

    def change_each(owned: OwnedTensor, gradient: Gradient, targets: Any, factors: Any) -> None:
        for index, target in enumerate(targets):
            change(target, factors[index] if isinstance(factors, list | tuple) else factors)

    return change_each


def _unscale(
    owned: OwnedTensor,
    gradient: Gradient,
    gradients: list[torch.Tensor],
    found: torch.Tensor,
    inverse: torch.Tensor,
) -> None:
    """Unscales gradients as torch.amp.GradScaler does. Sets `found` to 1 if a gradient is not finite."""
    finite, made = gradient.all_finite()  # the scaler could not list what is made now
    others: dict[Any, list[torch.Tensor]] = {}  # by mesh: torch takes lists of one kind
    for tensor in [*made, *(tensor for tensor in gradients if not isinstance(tensor, OwnedTensor))]:
        others.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    for alike in others.values():
        torch._amp_foreach_non_finite_check_and_unscale_(alike, found, inverse)
    for tensor in gradients:
        if isinstance(tensor, GradientTensor):
            tensor._gradient.scale(inverse)
    found.copy_(torch.where(finite, found, 1))


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _zero,
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _norm,
    _aten.mul_.Tensor: _mul,
    _aten.mul_.Scalar: _mul,
    _aten.div_.Tensor: _div,
    _aten.div_.Scalar: _div,
    **{overload: _each(torch.Tensor.mul_) for overload in _overloads(_aten._foreach_mul_)},
    **{overload: _each(torch.Tensor.div_) for overload in _overloads(_aten._foreach_div_)},
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
