"""The module hooks of a running model: they report the progress of a pass to the engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from dmuon import _C
from dmuon._running.call_inputs import CallInputs
from dmuon._running.hook_of_model import HookOfModel
from dmuon._running.readers import explain_mixed, is_inside_itself
from dmuon._running.refused_calls import (
    dtype_of_autocast,
    refuse_changed_weights,
    refuse_differentiated_parameters,
    refuse_other_casts,
    refuse_second_recomputation,
)
from dmuon._running.runtime import Runtime
from dmuon._running.structures import (
    arrived,
    computed_tensors,
    is_differentiated_again,
    is_transformed,
    map_tensors,
)
from dmuon._running.weak_call import WeakCall
from dmuon._setup.sharded import is_of_fsdp2


def add_hooks(runtime: Runtime) -> None:
    """Hooks the model and the modules of its units, for as long as they live."""
    by_autocast = [dtype_of_autocast(runtime, index) for index in range(len(runtime.units))]
    for index, unit in enumerate(runtime.units):
        for module in unit.modules:
            _Calls(runtime, index, module, by_autocast[index], reader=len(unit.modules) > 1)
    runtime.model.register_forward_pre_hook(_begin(runtime), prepend=True)
    runtime.model.register_forward_hook(_end(runtime), prepend=True, always_call=True)

    # Never the model itself, which encloses units or is one: else its hooks would run before _begin.
    def add_reader(index: int, module: nn.Module) -> None:
        _Calls(runtime, index, module, by_autocast[index], reader=True)

    runtime.add_reader = add_reader

    # They may read weights, and never become readers (UnitReaders). Pickled, they leave it to the weights to refuse.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_enclosing(module: nn.Module, args: Any, output: Any) -> None:
        _expect_same_weights(runtime, runtime.last_met, output)

    for module in runtime.enclosing - {runtime.model, *(module for unit in runtime.units for module in unit.modules)}:
        module.register_forward_hook(HookOfModel(after_enclosing))


def _begin(runtime: Runtime) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(module: nn.Module, args: Any) -> None:
        runtime.refuse_forward()
        refuse_differentiated_parameters(module)
        if runtime.fsdp_modules and is_differentiated_again():
            raise ValueError(
                "dmuon: a gradient of torch.func, whose result belongs to a graph, under fully_shard: FSDP2 gives "
                "wrong gradients of gradients. Expected: dmuon without fully_shard, and dedicate_params(..., "
                "reshard_after_forward=False); or the gradient under torch.no_grad(), with reshard_after_forward=False."
            )
        if is_inside_itself(runtime.model):
            return
        if not _C.in_backward():
            runtime.one_thread.begin("a forward")
            runtime.step_agreement.end_failed_backward()
        runtime.begin_forward()

    return begin


def _end(runtime: Runtime) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(module: nn.Module, args: Any, output: Any) -> None:
        read = runtime.last_met  # by an operation
        if not is_inside_itself(runtime.model):
            if not _C.in_backward():
                if runtime.one_thread.is_held_by_another():
                    return  # this thread's forward was refused, and the other's goes on
                runtime.one_thread.end()
            explain_mixed(runtime)
            runtime.end_forward()
        if torch.is_grad_enabled():
            runtime.engine.watch_root_outputs(computed_tensors(output))
            _expect_same_weights(runtime, read, output)

    return end


class _Calls:
    """The hooks of one module: its calls use a unit or, of a reader, are a part of a use.

    `autocast` is the unit's `dtype_of_autocast`.
    """

    def __init__(
        self, runtime: Runtime, index: int, module: nn.Module, autocast: torch.dtype | None, reader: bool
    ) -> None:
        self._runtime, self._index, self._autocast, self._reader = runtime, index, autocast, reader
        self._module = module
        self._open: list[tuple[_C.Call, CallInputs]] = []
        # Hooks prepended after fully_shard run before FSDP2's. So the engine issues the operations of a skipped unit
        # before FSDP2 can block the host. The same holds in a backward, because we watch inputs inside of FSDP2's hook
        # on them.
        _register_behind_fsdp(module, self._watch_inputs)
        module.register_forward_pre_hook(self._before, prepend=True)
        module.register_forward_hook(self._after, prepend=True, always_call=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, module: nn.Module, args: Any) -> None:
        runtime, index = self._runtime, self._index
        runtime.refuse_forward()
        if self._autocast is not None:
            refuse_other_casts(runtime, index, self._autocast)
        runtime.step_agreement.end_failed_backward(before_use=True)
        if self._open and not _C.in_backward() and not is_inside_itself(module):
            self._end_interrupted()
        runtime.engine.before_forward(index, self._reader)
        self._open.append((_C.Call(self._reader, self._is_nested()), CallInputs()))
        if not self._reader and runtime.units[index].host and _C.in_backward() and torch.is_grad_enabled():
            refuse_second_recomputation(runtime, index)
        runtime.weights[index].begin_call(self._reader)

    def _is_nested(self) -> bool:
        """True if the call that begins is inside of another one, or recomputed inside of another one's backward."""
        weights = self._runtime.weights[self._index]
        recomputes = _C.in_backward() and torch.is_grad_enabled()
        return bool(self._open) or (recomputes and weights.is_in_backward and not self._reader)

    def _end_interrupted(self) -> None:
        for _ in self._open:
            self._runtime.weights[self._index].end_call()
            self._runtime.engine.forget_call(self._index)  # no trigger: other ranks may have ended it in its forward
        self._open.clear()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # A copy of an input would lose its tangent, and a wrapper of torch.func; then the backward's end ends the use.
        if is_transformed() or not torch.is_grad_enabled():
            return None
        if self._runtime.ranks.tensor_mesh is not None:
            args, kwargs = map_tensors((args, kwargs), arrived)
        call, call_inputs = self._open[-1]

        def watch(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            # The end comes before the engine frees the weights, which a checkpoint inside the module may have changed.
            return self._runtime.engine.watch_inputs(self._index, inputs, call, WeakCall(_Calls._end_in_backward, self))

        return call_inputs.watched((args, kwargs), watch)

    # Runs even if the forward raises, as an early-stopped recomputation does.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        runtime, index = self._runtime, self._index
        if self._reader and not self._open:
            self._read_in_backward(output)
            return None
        opened = self._open.pop() if self._open else None
        runtime.weights[index].end_call()
        runtime.engine.after_forward(index, self._reader)
        if opened is None:
            return None  # _before has raised
        call, call_inputs = opened
        output, outputs = call_inputs.outputs(runtime.units[index].label, output)
        if not torch.is_grad_enabled():
            return output
        # Before any Python hook: all of a tensor's Python hooks, FSDP2's too, run in the place of its first one.
        runtime.engine.watch_outputs(index, outputs, call)
        enters = WeakCall(_Calls._enter_backward, self, runtime.version)
        for tensor in outputs if runtime.units[index].leaves else ():
            tensor.register_hook(enters)
        skipped = WeakCall(_Calls._enter_skipped, self, runtime.version)
        for tensor in outputs:
            _C.on_skipped_gradient(tensor, skipped)
        return output

    def _read_in_backward(self, output: Any) -> None:
        """Has the weights there when the backward begins of the call in which a reader was found.

        A checkpoint's recomputation of the call may read, and save, weights that others have put in.
        """
        _on_gradients(output, WeakCall(_Calls._enter_reader, self, self._runtime.version))

    def _enter_reader(self, version: int, gradient: torch.Tensor) -> None:
        runtime = self._runtime
        refuse_changed_weights(runtime, runtime.units[self._index].label, version)
        if not torch.is_grad_enabled():
            runtime.readers[self._index].begin()
            runtime.readers[self._index].end()

    def _enter_skipped(self, version: int) -> None:
        """Does what the hooks on an output do, FSDP2's too, because the backward skips these."""
        if isinstance(self._module, FSDPModule):
            self._module._get_fsdp_state()._pre_backward(torch.empty(0))
        if self._runtime.units[self._index].leaves:
            self._enter_backward(version)

    def _end_in_backward(self) -> None:
        if torch.is_grad_enabled():
            return  # create_graph=True, see Engine::enter_second_order
        self._runtime.weights[self._index].end_call_in_backward(self._reader)

    def _enter_backward(self, version: int, gradient: torch.Tensor | None = None) -> None:
        """Shows the weights, and holds the model. Raises ValueError if the forward had another version of them."""
        runtime = self._runtime
        runtime.access.refuse("a backward", whole=True)
        opens_pass = not torch.is_grad_enabled()  # see Engine::enter_second_order
        if opens_pass and runtime.device.type == "cpu":  # elsewhere hooks run in threads of autograd's
            runtime.one_thread.begin_backward()
        refuse_changed_weights(runtime, runtime.units[self._index].label, version)
        if not self._reader:
            runtime.weights[self._index].show_weights()


def _register_behind_fsdp(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Registers a pre-hook that runs behind FSDP2's and earlier ones of ours.

    Users' hooks, which may read weights too, come behind it, unless they are prepended to FSDP2's.
    """
    module.register_forward_pre_hook(hook, with_kwargs=True)
    hooks = cast("OrderedDict[int, Any]", module._forward_pre_hooks)
    *others, _ = hooks
    num_ahead = 0
    for number, each in enumerate(others, 1):
        if is_of_fsdp2(hooks[each]) or getattr(hooks[each], "__module__", "") == __name__:
            num_ahead = number
    for user in others[num_ahead:]:
        hooks.move_to_end(user)


def _expect_same_weights(runtime: Runtime, read: int | None, output: Any) -> None:
    """Lets a backward through `output` raise ValueError after a change of weights. `read`: a leaf, if any was."""
    if read is None:
        return
    _on_gradients(output, WeakCall(refuse_changed_weights, runtime, runtime.leaves[read].name, runtime.version))


def _on_gradients(output: Any, hook: Callable[[torch.Tensor], None]) -> None:
    for tensor in computed_tensors(output) if torch.is_grad_enabled() else ():
        tensor.register_hook(hook)
