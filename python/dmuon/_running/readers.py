"""Readers: the modules whose calls read a unit's weights where the unit's own module is not called."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
import torch.nn as nn
from torch.nn.parallel import distributed as data_parallel

from dmuon import _C
from dmuon._running.unit_weights import UnitWeights
from dmuon._setup.place import joined
from dmuon._setup.tensor_parallel import is_sharded
from dmuon._setup.units import Unit


class UnitReaders:
    """Finds the readers of a unit, by operations that meet a placeholder inside a call of a module of the model.

    Such an operation gets the weight (`LeafSource`), so the first pass is exact before anyone knows the readers. Then
    the module that runs, and all that hold the unit's leaves, report their calls by hooks. Holds the runtime weakly,
    and no module, because the engine holds placeholders, and Python never collects a cycle through C++.
    """

    def __init__(self, runtime: Any, index: int) -> None:
        """`runtime` is a Runtime, whose module imports this one. `index` is the unit's."""
        self._runtime: weakref.ref[Any] = weakref.ref(runtime)
        self._index = index
        self.weights: dict[int, nn.Parameter] = {}  # by leaf, as modules see them
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # whose readers are hooked

    def is_open(self, leaf: int) -> bool:
        """Returns True inside of a call of a module of the model, and inside of a backward. An operation meets `leaf`.

        Raises:
            ValueError: that module holds one of the unit's leaves, and a parameter that `fully_shard` has not gathered.
        """
        runtime = self._runtime()
        if runtime is None or runtime.access.whole:
            return False
        module = _innermost(runtime.model)
        if module is not None:
            runtime.last_met = leaf
            self._refuse_beside_shards(runtime, module)
        return module is not None or _C.in_backward()

    def _refuse_beside_shards(self, runtime: Any, module: nn.Module) -> None:
        shards = [name for name, parameter in module._parameters.items() if is_sharded(parameter, runtime.ranks)]
        places = [place for place in runtime.weights[self._index].places if place.module is module]
        if shards and places:
            raise ValueError(
                f"dmuon: '{places[0].name}' is used outside of the forward of the module that fully_shard was given, "
                f"so '{joined(places[0].path, shards[0])}' beside it is not gathered. Expected: the use inside of that "
                "forward; or fully_shard on the module that holds both, before dmuon.Muon."
            )

    def begin(self) -> None:
        """Begins a read of the weights by the code that runs."""
        runtime = self._alive()
        module = _innermost(runtime.model)
        if module is not None:
            runtime.refuse_forward()
            runtime.step_agreement.end_failed_backward(before_use=True)
            self._find(runtime, module)
        runtime.engine.before_forward(self._index, True)

    def end(self) -> None:
        """Ends the read."""
        self._alive().engine.after_forward(self._index, True)

    def changed(self) -> None:
        """Takes the weights for new masters, because the code that runs has changed them. Collective."""
        weights: UnitWeights = self._alive().weights[self._index]
        weights.take_back_all()

    def _alive(self) -> Any:
        runtime = self._runtime()
        assert runtime is not None
        return runtime

    def _find(self, runtime: Any, module: nn.Module) -> None:
        if module in self._met:
            return
        self._met.add(module)
        known = runtime.reader_modules[self._index]
        holders = [place.module for place in runtime.weights[self._index].places]
        # A module around other units, such as the model, would keep all that it reads until its own end. So it has no
        # hooks, and each of its operations asks again.
        for found in holders if module in runtime.enclosing else (module, *holders):
            if found not in known and found not in runtime.units[self._index].modules:
                known.append(found)
                runtime.add_reader(self._index, found)


class LeafSource:
    """The source of one leaf's weight, see WeightSource."""

    def __init__(self, readers: UnitReaders, leaf: int) -> None:
        self._readers, self._leaf = readers, leaf

    def is_open(self) -> bool:
        return self._readers.is_open(self._leaf)

    def begin(self) -> torch.Tensor:
        self._readers.begin()
        return self._readers.weights[self._leaf]

    def end(self) -> None:
        self._readers.end()

    def changed(self) -> None:
        self._readers.changed()


def around_units(model: nn.Module, units: list[Unit]) -> set[nn.Module]:
    """Returns the modules of a model that enclose another one of a unit."""
    of_units = {module for unit in units for module in unit.modules}
    paths = {path for path, module in model.named_modules(remove_duplicate=False) if module in of_units} - {""}
    above: set[str] = set()
    while paths := {path.rpartition(".")[0] for path in paths if path} - above:
        above |= paths
    return {model.get_submodule(path) for path in above}


def explain_mixed(runtime: Any) -> None:
    """Adds the weight and the way out to an error of torch's, which leaves a forward: DTensors and others in one call.

    Torch asks DTensors first, so no operation on a placeholder beside one comes to dmuon.
    """
    error, leaf = sys.exc_info()[1], runtime.last_met
    runtime.last_met = None
    if leaf is None or not isinstance(error, RuntimeError) or "mixed torch.Tensor and DTensor" not in str(error):
        return
    if (slices := runtime.leaves[leaf].slices) is not None:
        error.args = (
            f"{error}\ndmuon: '{runtime.leaves[leaf].name}' is divided by tensor parallelism, {slices}, and was used "
            "outside of the calls of its module. Expected: a call of that module, in whose forward the weight is a "
            "DTensor, in place of the weight; and DTensors for all that it is used with.",
        )


def is_inside_itself(model: nn.Module) -> bool:
    """Returns True if the model's call that runs on this thread is inside of another call of the model."""
    num_calls, frame = 0, sys._getframe(1)
    while frame is not None and num_calls < 2:
        num_calls += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is model
        frame = frame.f_back  # type: ignore[assignment]
    return num_calls > 1


def _innermost(model: nn.Module) -> nn.Module | None:
    """Returns the module of the model whose call, or whose `forward`, runs innermost on this thread.

    None also if DistributedDataParallel asks, which acts inside of a call and would copy weights.
    """
    modules: set[nn.Module] = set()
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != data_parallel.__file__:
        if frame.f_code.co_name in ("_call_impl", "forward"):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                modules = modules or set(model.modules())
                if module in modules:
                    return module
        frame = frame.f_back  # type: ignore[assignment]
    return None
