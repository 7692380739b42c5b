"""The engine of one model, between its module hooks and its optimizer."""

from __future__ import annotations

import dataclasses
import logging
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dmuon import _C
from dmuon._planning.owner_plan import Plan
from dmuon._running.structures import map_tensors, tensors_requiring_grad
from dmuon._setup import ranks
from dmuon._setup.dedication import Dedication
from dmuon._setup.placeholder import OwnedTensor
from dmuon._setup.routing import Matrix, RoutingTable
from dmuon._setup.sites import Site, UnitSites
from dmuon._setup.units import Unit

logger = logging.getLogger("dmuon")

_LARGE_UNIT = 0.25  # of all matrix bytes


class Runtime:
    """Everything dmuon keeps of a model: engine, placeholders, hooks. One thread at a time."""

    def __init__(
        self, model: nn.Module, dedication: Dedication, plan: Plan, units: list[Unit], device: torch.device
    ) -> None:
        self.model = model
        self.ranks = dedication.ranks
        self.matrices: list[Matrix] = dedication.matrices
        self.plan = plan
        self.units = units
        self.device = device
        self.whole = False  # inside full_params
        self.no_sync_depth = 0
        self.writes_back = False  # at the end of full_params
        self.host_parameters: Callable[[], list[nn.Parameter]] = list  # what AdamW updates; Muon says
        self.settings: Callable[[], Any] = list  # the hyperparameters; Muon says
        self.applied = 0  # digest of the hyperparameters of all steps so far
        self.engine = self._make_engine(dedication)
        self.state = _C.MuonState(self.engine)
        self.placeholders = self._make_placeholders()
        self._sites = [self._bind(index) for index in range(len(units))]
        self._take_masters()
        self._put_back(dedication)
        self._hook()
        self._warn_of_large_units()

    # ---- construction ----

    def _make_engine(self, dedication: Dedication) -> _C.Engine:
        place, policy = self.ranks, dedication.mp_policy
        options = _C.Options()
        options.num_replicates, options.num_shards = place.num_replicates, place.num_shards
        options.replicate, options.shard = place.replicate, place.shard
        options.device = self.device
        options.schedule = dedication.schedule.native()
        options.reshard_after_forward = dedication.reshard_after_forward
        options.host_replicates = place.host_replicates
        unit_of = {matrix: index for index, unit in enumerate(self.units) for matrix in unit.matrices}
        specs = [
            _C.MatrixSpec(matrix.shape[0], matrix.shape[1], unit=unit_of[index], owner=self.plan.owner[index])
            for index, matrix in enumerate(self.matrices)
        ]
        unit_specs = []
        for unit in self.units:
            dtype = self.matrices[unit.matrices[0]].parameter.dtype
            compute = policy.param_dtype or dtype
            unit_specs.append(
                _C.UnitSpec(unit.name or "(root)", list(unit.matrices), compute, policy.reduce_dtype or compute)
            )
        owned = [matrices for slot, matrices in self.plan.batches if slot == place.slot]
        assert dedication.groups is not None
        return _C.Engine(options, dedication.groups, specs, unit_specs, owned)

    def _make_placeholders(self) -> list[nn.Parameter]:
        placeholders, gradients = [], []
        me = weakref.ref(self)
        for index, matrix in enumerate(self.matrices):
            # Weakly: the engine holds these stand-ins, and a cycle through C++ is never collected.
            def clear(index: int = index) -> None:
                if (runtime := me()) is not None:
                    runtime.engine.clear_gradient(index)

            dtype = matrix.parameter.dtype
            placeholders.append(nn.Parameter(OwnedTensor(matrix.name, matrix.shape, dtype, self.device, None)))
            gradients.append(OwnedTensor(f"{matrix.name}.grad", matrix.shape, dtype, self.device, clear))
        self.engine.set_placeholders(placeholders, gradients)
        return placeholders

    def _bind(self, index: int) -> UnitSites:
        weights = [nn.Parameter(view) for view in self.engine.views(index)]
        self.engine.bind(index, weights)
        return UnitSites(
            [
                Site(module, attribute, weight, self.placeholders[matrix])
                for matrix, weight in zip(self.engine.packed_order(index), weights, strict=True)
                for _, module, attribute in self.matrices[matrix].places
            ]
        )

    def _take_masters(self) -> None:
        for index, matrix in enumerate(self.matrices):
            master = self.state.master(index)
            if master is not None:
                master.copy_(matrix.parameter.detach())
            # Only the owner keeps values from here on.
            matrix.parameter = self.placeholders[index]

    def _put_back(self, dedication: Dedication) -> None:
        for index, matrix in enumerate(self.matrices):
            for _, module, attribute in matrix.places:
                module._parameters[attribute] = self.placeholders[index]
        for module, order in dedication.known.items():
            for attribute in order:
                if attribute in module._parameters:  # the user may have removed it
                    module._parameters[attribute] = module._parameters.pop(attribute)

    def _warn_of_large_units(self) -> None:
        sizes = [sum(self.matrices[m].shape.numel() for m in unit.matrices) for unit in self.units]
        large = [
            f"'{unit.name or '(root)'}' ({size / sum(sizes):.0%})"
            for unit, size in zip(self.units, sizes, strict=True)
            if size > _LARGE_UNIT * sum(sizes)
        ]
        if large and self.ranks.size > 1 and self.ranks.slot == 0:
            logger.warning(
                "dmuon moves a unit's matrices together, and these units hold more than %.0f %% of all matrix bytes: "
                "%s. Memory and overlap suffer. Split them: call fully_shard on smaller modules (each transformer "
                "block), or put blocks into a torch.nn.ModuleList.",
                100 * _LARGE_UNIT,
                ", ".join(large),
            )

    # ---- hooks ----

    def _hook(self) -> None:
        # Registered after fully_shard and prepended, ours run outside FSDP2's: what a skipped unit owes is issued
        # before FSDP2 can block the host.
        for index, unit in enumerate(self.units):
            unit.module.register_forward_pre_hook(self._before(index), prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(self._after(index), prepend=True, always_call=True)
        self.model.register_forward_pre_hook(self._begin(), prepend=True)
        self.model.register_forward_hook(self._end(), prepend=True)
        for module in {id(m): m for matrix in self.matrices for _, m, _ in matrix.places}.values():
            module.register_state_dict_pre_hook(self._refuse_state_dict("state_dict()"))
            module.register_load_state_dict_pre_hook(self._refuse_state_dict("load_state_dict()"))

    def refuse_inside_full_params(self, what: str) -> None:
        """Raises ValueError while every weight is whole."""
        if self.whole:
            raise ValueError(f"dmuon.full_params: {what} inside it. Expected: leave the context first.")

    def _refuse_state_dict(self, what: str) -> Any:
        def hook(*_: Any) -> None:
            if self.whole and what == "load_state_dict()" and not self.writes_back:
                raise ValueError(
                    "dmuon.full_params: load_state_dict() inside it without writeback would be lost. Expected: `with "
                    "dmuon.full_params(model, writeback=True)`."
                )
            if not self.whole:
                raise ValueError(
                    f"dmuon: {what} of a model whose matrices are owned is not supported yet. Expected: call it "
                    "inside `with dmuon.full_params(model, writeback=...)`, where every weight is whole."
                )

        return hook

    def _begin(self) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def begin(module: nn.Module, args: Any) -> None:
            self.refuse_inside_full_params("a forward")
            if not _C.in_backward():
                # A backward that raised has left weights in their places.
                for sites in self._sites:
                    sites.show_placeholders()
            self.engine.begin_forward()

        return begin

    def _end(self) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def end(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled():
                self.engine.watch_root_outputs(tensors_requiring_grad(output))

        return end

    def _before(self, index: int) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self.refuse_inside_full_params("a forward")
            self.engine.before_forward(index)
            self._sites[index].show_weights()
            if not torch.is_grad_enabled():
                return None
            inputs = tensors_requiring_grad((args, kwargs))
            if not inputs:
                return None
            watched = dict(zip(map(id, inputs), self.engine.watch_inputs(index, inputs), strict=True))
            return map_tensors((args, kwargs), lambda tensor: watched.get(id(tensor), tensor))

        return before

    def _after(self, index: int) -> Any:
        def show_weights(gradient: torch.Tensor) -> None:
            self.refuse_inside_full_params("a backward")
            self._sites[index].show_weights()

        # Called even when the forward raises, as an early-stopped recomputation does.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._sites[index].after_forward()
            self.engine.after_forward(index)
            if not torch.is_grad_enabled():
                return
            outputs = tensors_requiring_grad(output)
            for tensor in outputs:
                tensor.register_hook(show_weights)
            self.engine.watch_outputs(index, outputs)

        return after

    # ---- gradients that stay with the host framework ----

    def host_misses_partial_sums(self) -> bool:
        """Whether FSDP2 keeps sums of an HSDP mesh that only a synchronised backward sends on."""
        return self.ranks.host_replicates > 1 and self.engine.holds_partial_sums() and bool(fsdp_modules(self.model))

    def agree(self, max_norm: float | None = None, problem: str | None = None) -> _C.Verdict:
        """The step's verdict over all gradients, owned and not. Collective unless it is kept already.

        Args:
            max_norm: of clipping.
            problem: with this rank's hyperparameters; where only some ranks have it, the others raise.

        Raises:
            ValueError: on all ranks, where hyperparameters or `max_norm` differ, in this call or in the last step.
        """
        if self.host_misses_partial_sums():
            raise ValueError(
                "dmuon: clip or step after a backward under no_sync: FSDP2's gradients have not been summed over the "
                "replicates. Expected: the last backward before them outside of no_sync."
            )
        self.engine.settle_step()
        if self.engine.agreed():
            return self.engine.agree(_C.HostNorms(0.0, 0.0), 0)
        settings = zlib.crc32(repr((problem or self.settings(), max_norm, self.applied)).encode())
        host_parameters = self.host_parameters()
        self._average_replicas(host_parameters)
        sharded, replicated = [], []
        for parameter in host_parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                sharded.append(gradient.to_local())
            elif gradient is not None:
                replicated.append(gradient)
        try:
            return self.engine.agree(_C.HostNorms(_squared_norm(sharded), _squared_norm(replicated)), settings)
        except ValueError:
            if problem is not None:
                raise ValueError(problem) from None
            raise

    def _average_replicas(self, host_parameters: list[nn.Parameter]) -> None:
        """Averages gradients of parameters that no FSDP manages over all ranks, missing ones as zeros."""
        plain = [p for p in host_parameters if p.requires_grad and not isinstance(p, DTensor)]
        if self.ranks.size == 1 or not plain:
            return
        present = torch.tensor([float(p.grad is not None) for p in plain], device=plain[0].device)
        pieces = [
            p.new_zeros(p.numel(), dtype=torch.float32) if p.grad is None else p.grad.flatten().float() for p in plain
        ]
        flat = torch.cat([present, *pieces])
        self.engine.drain()  # lanes use these groups too
        for group in (ranks.row_group(self.ranks), ranks.column_group(self.ranks)):
            if group is not None:
                dist.all_reduce(flat, group=group)
        means = (flat[len(plain) :] / self.ranks.size).split([p.numel() for p in plain])
        for anywhere, parameter, mean in zip(flat[: len(plain)].tolist(), plain, means, strict=True):
            if not anywhere:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(mean.view_as(parameter))

    def table(self, first: RoutingTable) -> RoutingTable:
        """The routing table with owners and units."""
        known = {self.matrices[m].name: (self.plan.owner[m], unit.name) for unit in self.units for m in unit.matrices}
        rows = (
            dataclasses.replace(row, owner=known[row.name][0], unit=known[row.name][1]) if row.name in known else row
            for row in first
        )
        return RoutingTable(rows, first.note)


def _squared_norm(tensors: list[torch.Tensor]) -> float:
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return 0.0
    # fp64: the squares of small and of large gradients leave fp32's range.
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    return float(torch.stack(list(norms)).square().sum())


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules of `model` under fully_shard."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
