"""The engine of one model, with placeholders, weights and masters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from dmuon import _C
from dmuon._planning.owner_plan import Plan
from dmuon._running.access import Access
from dmuon._running.buffers import Buffers
from dmuon._running.copies import Copies
from dmuon._running.graphs import batch_graphs
from dmuon._running.host_state import let_gathers_wait
from dmuon._running.one_thread import OneThread
from dmuon._running.owned_gradient import Gradient, GradientTensor
from dmuon._running.plain_gradients import PlainGradients
from dmuon._running.readers import LeafSource, UnitReaders, around_units
from dmuon._running.step_agreement import StepAgreement
from dmuon._running.unit_weights import UnitWeights
from dmuon._running.weak_call import WeakCall
from dmuon._running.weight import Weight
from dmuon._saving.owned_shards import OwnedShards
from dmuon._setup import user_rules
from dmuon._setup.checksum import checksum
from dmuon._setup.dedication import BeforeMuon, Dedication, dedication_of
from dmuon._setup.groups import engine_groups
from dmuon._setup.hyperparameters import Tuned
from dmuon._setup.leaf import Leaf
from dmuon._setup.meta_start import MetaStart
from dmuon._setup.options import dtypes_of
from dmuon._setup.place import Place, restore_order
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.sharded import fsdp_modules
from dmuon._setup.slices import cuts_experts, local_part
from dmuon._setup.tensor_parallel import is_sharded
from dmuon._setup.units import Unit


class Runtime:
    """All objects of a model at work. Used by one thread at a time."""

    def __init__(
        self,
        model: nn.Module,
        dedication: Dedication,
        before_muon: BeforeMuon,
        plan: Plan,
        units: list[Unit],
        device: torch.device,
        tuned: Tuned,
        optimizer: torch.optim.Optimizer,
        rule: str,
    ) -> None:
        """`optimizer` is the model's. The first clipping or step reads it, and nothing before. `rule` is of update."""
        self.model = model
        self.ranks = dedication.ranks
        self.leaves: list[Leaf] = dedication.leaves
        self.leaf_named = {leaf.name: index for index, leaf in enumerate(self.leaves)}
        self.plan, self.units = plan, units
        self.device, self.tuned = device, tuned
        self.last_met: int | None = None  # leaf, by an operation in the forward that runs
        self.one_thread = OneThread()
        self.version = 0  # of the weights: another number after each step, load and write
        self.num_taken_back = 0  # changes of weights by modules, in forwards
        self.num_means = 0  # Emas that were made
        self.no_sync_depth = 0
        self.fsdp_modules = fsdp_modules(model)
        self.divide_factor = dedication.across_ranks.divide_factor(self.ranks.num_slots)
        self.add_reader: Callable[[int, nn.Module], None]  # hooks a module that reads a unit's weights
        self.enclosing = around_units(model, units)
        self.reader_modules: list[list[nn.Module]] = [[] for _ in units]  # by unit, as they were found
        self.recomputed: dict[int, int] = {}  # by unit: the last backward in which a reentrant checkpoint did
        self.engine = self._make_engine(dedication)
        self.access = Access(self.engine)
        self.buffers = Buffers(model, dedication)
        self.transfers = self.engine.transfers()
        self.parts = [leaf.parameters for leaf in self.engine.leaves()]
        self.copies = Copies(self.leaves, self.parts, self.ranks, device)
        self.step_agreement = StepAgreement(self, optimizer, rule)
        self.graphs = batch_graphs()
        states = _C.add_states(self.engine, user_rules.native(rule), tuned.memo_words(device))
        self.placeholders = self._make_placeholders(before_muon.meta_start)
        self.leaf_of = {placeholder: index for index, placeholder in enumerate(self.placeholders)}
        self.cast_places: list[Place] = []  # of leaves whose compute dtype is another
        self.weights = [self._bind(index, dedication.mp_policy) for index in range(len(units))]
        self.engine.before_end_of_backward(WeakCall(Runtime._end_uses, self))
        for module, order in before_muon.known.items():
            restore_order(module, order)
        self.plain = PlainGradients(model, dedication, self.engine, optimizer)
        self.shards = OwnedShards(self.transfers, self.leaves, states, self.ranks, dedication.mesh)

    def _make_engine(self, dedication: Dedication) -> _C.Engine:
        options = _C.EngineOptions()
        options.device = self.device
        options.step = dedication.schedule
        options.gradient_scale = self.ranks.num_slots / self.divide_factor
        options.host_replicates = self.ranks.host_replicates
        units = []
        for unit in self.units:
            dtype = self.leaves[unit.leaves[0]].parameter.dtype if unit.leaves else torch.float32
            units.append(_C.UnitSpec(unit.label, *dtypes_of(dedication.mp_policy, dtype), unit.host))
        sizes = [list(leaf.shape) for leaf in self.leaves]
        is_parallel = self.ranks.tensor_parallel > 1
        cuts = [None if leaf.cut is None else _C.Cut(*leaf.cut) for leaf in self.leaves if is_parallel]
        return _C.Engine(options, engine_groups(self.ranks, self), self.plan.native, units, sizes, cuts)

    def _make_placeholders(self, meta_start: MetaStart | None) -> list[nn.Parameter]:
        placeholders, gradients = [], []
        self.readers = [UnitReaders(self, index) for index in range(len(self.units))]
        unit_of = {leaf: index for index, unit in enumerate(self.units) for leaf in unit.leaves}
        for index, leaf in enumerate(self.leaves):
            dtype = leaf.parameter.dtype
            is_trainable = meta_start is None or meta_start.is_trainable(index)
            placeholder = OwnedTensor(leaf.name, leaf.shape, dtype, self.device)
            placeholder._source = LeafSource(self.readers[unit_of[index]], index)
            placeholders.append(nn.Parameter(placeholder, is_trainable))
            gradients.append(GradientTensor(f"{leaf.name}.grad", leaf.shape, dtype, self.device))
            gradients[-1]._gradient = Gradient(self, index)
        self.engine.set_placeholders(placeholders, gradients)
        return placeholders

    def gathered(self, index: int, name: str) -> torch.Tensor:
        """Returns a leaf's whole named tensor, of its owners, on every rank. Collective."""
        found, slices = self.transfers.gather(index, name), self.leaves[index].slices
        return found if slices is None else slices.gathered(found)

    def meet(self, call: str, *, whole: bool = False, averaged: bool = False) -> None:
        """Waits until all ranks have come to `call`, outside of passes; see `Access.refuse`. Collective."""
        self.end_passes(call, whole=whole, averaged=averaged)
        self.engine.meet(call)

    def end_passes(self, call: str, *, whole: bool = False, averaged: bool = False) -> None:
        """Ends what passes have left open on this rank, before `call`."""
        self.access.refuse(call, whole=whole, averaged=averaged)
        self.one_thread.refuse_others(call)
        self.step_agreement.end_failed_backward()
        self.show_placeholders()
        for module in self.fsdp_modules:
            module.reshard()

    def _bind(self, index: int, policy: MixedPrecisionPolicy) -> UnitWeights:
        unit = self.engine.unit(index)
        packed = [Weight.over(view) for view in unit.weight_tensors()]
        leaves = unit.packing().leaves
        weights = [self._as_seen(leaf.index, weight) for leaf, weight in zip(leaves, packed, strict=True)]
        # The engine keeps the function, which must not keep the model.
        slices = {leaf.index: held for leaf in leaves if (held := self.leaves[leaf.index].slices) is not None}
        self.engine.bind(index, weights, lambda leaf, gradient: slices[leaf].of_gradient(gradient))
        places = []
        self.readers[index].weights = {leaf.index: weight for leaf, weight in zip(leaves, weights, strict=True)}
        for leaf, weight in zip(leaves, weights, strict=True):
            placeholder, in_forward = self.placeholders[leaf.index], None
            if dtypes_of(policy, placeholder.dtype)[0] != placeholder.dtype:
                of_compute_dtype = cast("OwnedTensor", placeholder).of_dtype(weight.dtype)
                in_forward = nn.Parameter(of_compute_dtype, placeholder.requires_grad)
                _C.accumulate_into(weight, in_forward)
                in_forward.__dict__ = placeholder.__dict__
                self.cast_places += self.leaves[leaf.index].places
            for place in self.leaves[leaf.index].places:
                place.put_back(placeholder, weight, in_forward)
                places.append(place)
        return UnitWeights(places, packed, lambda: self._take_back(index))

    def _as_seen(self, index: int, packed: Weight) -> nn.Parameter:
        """Returns what a leaf's modules compute with: its packed weight, or a DTensor that shares its memory."""
        slices = self.leaves[index].slices
        if slices is None or self._has_all_experts():
            return packed
        seen = nn.Parameter(slices.as_dtensor(packed.detach()))
        packed.seen_as(seen)
        return seen

    def _has_all_experts(self) -> bool:
        """True if what looks like tensor parallelism over one rank is expert parallelism: it cuts stacks alone."""
        slices = [leaf.slices for leaf in self.leaves if leaf.slices is not None]
        return self.ranks.tensor_parallel == 1 and all(cuts_experts(of.shape, of.placement) for of in slices)

    def _end_uses(self) -> None:
        self.one_thread.end()
        for weights in self.weights:
            weights.end_backward()

    def _take_back(self, index: int) -> None:
        """Takes a unit's weights for new masters, which a module has changed. Collective."""
        self.access.refuse(f"a change of the weights of '{self.units[index].label}' in a forward", averaged=True)
        weights = self.readers[index].weights.items()
        whole = [w for leaf, w in weights if self.leaves[leaf].num_columns == 1 and self.leaves[leaf].cut is None]
        checksums = [checksum(local_part(weight)).cpu() for weight in whole]
        self.num_taken_back += 1
        self.engine.take_back(index, int(checksum(torch.stack(checksums))) if checksums else 0)

    def begin_forward(self) -> None:
        """Begins a forward of the model."""
        for place in self.cast_places:
            place.begin_forward()
        self.engine.begin_forward()
        self.buffers.begin_forward(self.engine, syncs=self.no_sync_depth == 0)

    def end_forward(self) -> None:
        """Ends the model's forward."""
        try:
            self.engine.end_forward()
        finally:
            self.show_own_dtypes()

    def show_own_dtypes(self) -> None:
        """Replaces the placeholders of the compute dtype by those of the leaves' own."""
        for place in self.cast_places:
            place.end_forward()

    def plain_of(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Returns those that neither dmuon nor fully_shard manages. No unit's weights may be in modules."""
        return [p for p in parameters if not isinstance(p, OwnedTensor) and not is_sharded(p, self.ranks)]

    def show_placeholders(self) -> None:
        """Replaces all weights in modules by placeholders: a pass that raised has not."""
        for weights in self.weights:
            weights.show_placeholders()
        self.show_own_dtypes()

    def publish(self, replaced: bool = False) -> None:
        """Makes units see the masters that were written. Collective.

        `replaced`: other weights are trained from now on, so what forwards have shown of the former is forgotten.
        """
        self.renew_version()
        self.engine.publish()
        if replaced and (after := self.step_agreement.after_step) is not None:
            after.forget()
            self.engine.forget_verdict()  # which has the largest logits

    def renew_version(self) -> None:
        """Notes that weights are others from now on."""
        self.version += 1
        self.let_gathers_wait()

    def let_gathers_wait(self) -> None:
        """Lets FSDP2's gathers wait for the shards that were written, also those of a backward that comes next."""
        if self.device.type != "cpu":
            let_gathers_wait(self.fsdp_modules)

    def refuse_forward(self) -> None:
        """Raises ValueError while every weight is whole, or offloaded, or if a leaf was never initialised or loaded."""
        self.access.refuse("a forward", whole=True)
        if self.shards.without_values:
            names = [self.leaves[index].name for index in sorted(self.shards.without_values)]
            raise ValueError(
                f"dmuon: a forward, and '{names[0]}' has no values, nor have {len(names) - 1} more. Expected: the "
                "model's initialisation between model.to_empty(...) and dmuon.Muon(model), or a checkpoint loaded."
            )


def find_runtime(model: nn.Module, function: str) -> Runtime | None:
    """Returns the runtime of a model, None before Muon.

    Raises:
        ValueError: dedicate_params was not called on the model. Names `function`.
    """
    found: Runtime | None = dedication_of(model, function).runtime
    return found


def runtime_of(model: nn.Module, function: str) -> Runtime:
    """Returns the runtime of a model.

    Raises:
        ValueError: dedicate_params or Muon was not called on the model. Names `function`.
    """
    found = find_runtime(model, function)
    if found is None:
        raise ValueError(f"{function}: model: expected a model with dmuon.Muon(model), got one without")
    return found
