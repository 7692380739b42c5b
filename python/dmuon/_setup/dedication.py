"""The first call: takes leaves out of a model, so that fully_shard does not see them."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import inspect
import logging
import os
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.weak import WeakIdKeyDictionary

from dmuon._plan import StepOptions
from dmuon._setup.agreement import agreement
from dmuon._setup.attributes import Attributes
from dmuon._setup.guards import Handle, guards, refuse_former_gradients
from dmuon._setup.leaf import Leaf
from dmuon._setup.members import former_parameters, note_former
from dmuon._setup.meta_start import MetaStart
from dmuon._setup.options import STEP, Ablation, AcrossRanks, Planning, check_as_for_fully_shard, step_options
from dmuon._setup.ranks import Ranks, check_mesh, contradicted_by_names
from dmuon._setup.resolve_ranks import check_timeout, resolve_ranks
from dmuon._setup.routing import DEDICATION, Select, route
from dmuon._setup.routing_table import RoutingTable
from dmuon._setup.rules import fitting_entries
from dmuon._setup.sharded import check_sharded, mesh_and_policy_of, release, replaced_by_fsdp, tensor_mesh_of
from dmuon._setup.units import Units, chosen_units
from dmuon._setup.wrappers import plain_module, unwrapped

logger = logging.getLogger("dmuon")


@dataclasses.dataclass
class BeforeMuon:
    """What `Muon` needs of the time between the two calls. It holds modules that may leave the model."""

    known: dict[nn.Module, dict[str, bool]]  # by module: its parameters in order, True if trainable
    chosen_units: list[tuple[nn.Module, ...]]  # the modules of each unit that the user chose
    attributes: Attributes
    guards: list[Handle]  # against early use
    late_updates: bool | None  # as given
    meta_start: MetaStart | None = None  # if the model was built on the meta device

    def end(self) -> None:
        """Removes the guards, because Muon has put placeholders in."""
        if self.meta_start is not None:
            self.meta_start.end()
        for handle in self.guards:
            handle.remove()


@dataclasses.dataclass
class Dedication:
    """The state of a dedicated model, stored in the model from dedicate_params on."""

    ranks: Ranks
    mesh: DeviceMesh | None  # as given
    leaves: list[Leaf]
    table: RoutingTable
    mp_policy: MixedPrecisionPolicy
    planning: Planning
    across_ranks: AcrossRanks
    schedule: StepOptions
    before_muon: BeforeMuon | None  # None from the moment on at which Muon changes the model
    former: WeakIdKeyDictionary  # names of parameters that the model had, and that users may still have
    replaced: dict[int, str]  # names of those that an earlier fully_shard has replaced, by FSDP2's numbers
    ablation: Ablation = dataclasses.field(default_factory=Ablation)
    runtime: Any = None  # from Muon on a Runtime, whose class this package may not import

    @property
    def meta_start(self) -> MetaStart | None:
        """How the model gets its values, if it was built on the meta device. None from Muon on."""
        return None if self.before_muon is None else self.before_muon.meta_start


def dedication_of(model: nn.Module, function: str) -> Dedication:
    """Returns the dedication of a model.

    Raises:
        ValueError: dedicate_params was not called on the model. Names `function`.
    """
    given = vars(model).get(DEDICATION) if isinstance(model, nn.Module) else None
    found: Dedication | None = given or vars(plain_module(model, function)).get(DEDICATION)
    if found is None:
        raise ValueError(
            f"{function}: model: expected the module that dmuon.dedicate_params(model, ...) was given, not one inside "
            f"of it; got a {type(model).__name__} that was not given"
        )
    return found


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = STEP.reshard_after_forward,
    replicated: bool = STEP.replicated,
    select: Select | None = None,
    units: Units = None,
    strategy: str = Planning.strategy,
    plan: str | os.PathLike[str] | None = Planning.plan,
    costs: str | os.PathLike[str] = Planning.costs,
    layout_slack: float = Planning.layout_slack,
    max_memory_bytes: int | None = Planning.max_memory_bytes,
    node_copy: bool = STEP.node_copy,
    lookahead: int = STEP.lookahead,
    max_units_in_flight: int | None = None,
    late_updates: bool | None = None,
    sync_from_rank0: bool = AcrossRanks.sync_from_rank0,
    gradient_divide_factor: float | None = AcrossRanks.gradient_divide_factor,
    broadcast_buffers: bool | None = AcrossRanks.broadcast_buffers,
    timeout: datetime.timedelta | None = None,
) -> RoutingTable:
    """Gives every weight matrix of `model` to Muon. Call it before or after `fully_shard`, then `dmuon.Muon(model)`.

    Muon gets the trainable weights of linear layers, of routers and of the other classes in `dmuon.views.by_class`, and
    stacks of experts. Muon does not get weights tied to an embedding, the output head, and parameters that a module
    computes its weight from. The other parameters stay with the host framework and AdamW. Collective over the mesh. No
    forward may run before `Muon`.

    Args:
        model: on its device or on the CPU, initialised alike on all ranks, with matrices in fp32, bf16 or fp16. Or on
            the meta device: then call `model.to_empty(device=...)` after `fully_shard`, and initialise the model before
            `Muon` or load it afterwards. Its values are drawn as in one process if all ranks have one seed. A model
            may be under `fully_shard` already, before its first forward. Then its matrices leave `fully_shard`, and
            only their owners need memory for whole matrices.
        mesh: as for `fully_shard`: 1-D (shard) or 2-D (replicate, shard). None means the mesh of an earlier
            `fully_shard`, else all ranks, or one device if no process group exists.
        mp_policy: as for `fully_shard`; None means the earlier one's. Without `fully_shard`, `param_dtype` needs
            `torch.autocast` to that dtype around the call of the model, and `output_dtype` must be None.
        reshard_after_forward: True to free a unit's matrices between its forward and backward. None means True.
        replicated: True to keep all matrices whole on every rank between steps, as `DistributedDataParallel` does, for
            models that fit on each device. `step()` sends each new weight once, behind the rest of the step and the
            next forward; after the first forward no pass sends any. Owners alone have masters and momenta. Then
            `reshard_after_forward` and `node_copy` count as False.
        select: `select(name, module, parameter)` returns True (Muon), False (AdamW), None (by the rule), or a
            `dmuon.View` or several (Muon, for these matrices of the parameter; see `dmuon.views`).
        units: the modules whose matrices travel together, if not as dmuon finds them (an FSDPModule, else an item of a
            ModuleList): `units(name, module)` returns True for each, or a list has them. An item that is itself a list
            of modules is one unit, which several modules use together. How a unit is used decides when its matrices
            travel, so no choice changes a result.
        strategy: chooses the owners: "load_balance", or for comparison "milp" (the paper's formulation, needs SciPy),
            "lpt", "round_robin", "xor_layout", "rank0".
        plan: the file of a saved plan for this model and mesh, instead of strategy, costs and layout_slack.
        costs: the times that the plan balances: "measured", "modelled", or the file of a table. `Muon` measures on
            these ranks and stores the times in the user's cache. A single rank owns everything and measures nothing.
        layout_slack: share of the makespan that the plan may give up so that matrices used one after the other have
            owners in different columns.
        max_memory_bytes: the most bytes that any rank may use, as the plan counts them, without the sums of no_sync,
            and with 2 GiB in reserve on a GPU. None means no limit.
        node_copy: True to store weights from other nodes until the weights change, as HSDP does. Then a step moves
            each weight between nodes once.
        lookahead: number of units ahead of their use that weights travel between nodes. 0 sends everything when it is
            needed. With 1 or more, a unit's weights also travel inside the node while the previous unit computes.
        max_units_in_flight: the memory for packed weights and gradients, as a number of the largest unit's, 2 or more.
            What is left of it lets more gradients travel between nodes at once. None means lookahead + 2.
        late_updates: True to let `step()` return before the weights are new: matrices are orthogonalised beside the
            data loader and the next forward, which waits for each unit's weights where it uses them. What reads or
            writes weights and states waits. The weights are the same to the bit. It takes the memory of one batch's
            update during the forward. None means True on accelerators and on several nodes.
        sync_from_rank0: True to copy values from the first rank of the mesh at `Muon`: all matrices, and on every rank
            the parameters that no `fully_shard` manages. Stacks divided by experts come from the first rank with the
            same experts. Parameters under `fully_shard`, buffers and models built on the meta device do not change.
            False raises ValueError if ranks differ.
        gradient_divide_factor: divides the sum over all ranks of each gradient of a matrix, or of a parameter that no
            `fully_shard` manages. None means the number of ranks. Before the first step give
            `FSDPModule.set_gradient_divide_factor` the same number.
        broadcast_buffers: True to copy buffers from the first rank of the mesh to all others before the first forward,
            and before each forward after one that trained outside of `no_sync`, as `DistributedDataParallel` does. None
            means as `replicated`.
        timeout: the timeout of dmuon's process groups. None means PyTorch's default (30 minutes on gloo).

    Returns:
        The routing table; print it.

    Raises:
        ValueError: on every rank, if any rank finds something wrong or the ranks differ. On one rank alone, if its
            `mesh` is no mesh or does not hold it: without a common mesh the other ranks cannot know.
    """
    plain = unwrapped(model)
    mesh_there, policy_there = mesh_and_policy_of(plain)
    mesh = mesh_there if mesh is None else mesh
    mp_policy = policy_there if mp_policy is None else mp_policy
    ranks = resolve_ranks(mesh, plain, timeout, functools.partial(tensor_mesh_of, plain))
    step = (node_copy, lookahead, max_units_in_flight, reshard_after_forward, late_updates, replicated)
    planning = Planning(strategy, plan, costs, layout_slack, max_memory_bytes)
    across_ranks = AcrossRanks(sync_from_rank0, gradient_divide_factor, broadcast_buffers)
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    with agreement(ranks, "dedicate_params") as facts:
        model = plain_module(model, "dedicate_params")
        check_mesh(mesh)
        check_timeout(timeout)
        check_as_for_fully_shard(mp_policy, reshard_after_forward)
        schedule = step_options(*step)
        planning.check(schedule)
        across_ranks.check()
        leaves, table = route(model, select, ranks=ranks)
        chosen = chosen_units(model, units)
        check_sharded(leaves, model, ranks, mesh)
        facts += _facts_of_ranks(ranks, step, policy, {**vars(planning), **across_ranks.facts(), "timeout": timeout})
        facts += _facts_of(model, leaves, table, chosen)

    _warn(ranks, model, mesh, table)
    known = {m: {k: p.requires_grad for k, p in m._parameters.items() if p is not None} for m in model.modules()}
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    attributes, former = Attributes(known), (former_parameters(model), replaced_by_fsdp(model))
    before_muon = BeforeMuon(known, chosen, attributes, [*guards(model, leaves), *attributes.handles], late_updates)
    dedication = Dedication(ranks, mesh, leaves, table, policy, planning, across_ranks, schedule, before_muon, *former)
    _take_out(dedication, model)
    if on_meta:
        before_muon.meta_start = MetaStart(model, leaves, known, ranks)
    model.__dict__[DEDICATION] = dedication
    return table


def _take_out(dedication: Dedication, model: nn.Module) -> None:
    release(dedication.leaves, model)
    for place in [place for leaf in dedication.leaves for place in leaf.places]:
        place.take_out()
    note_former(dedication.former, dedication.leaves)
    refuse_former_gradients(dedication.leaves)


def _facts_of_ranks(ranks: Ranks, step: tuple[Any, ...], policy: object, options: dict[str, Any]) -> list[str]:
    """Returns what the ranks compare of their mesh, of the arguments of `step_options`, and of other options."""
    shape = ranks.num_replicates, ranks.num_shards, ranks.everyone, ranks.host_replicates
    slot = 1 if ranks.tensor_mesh is None else ranks.tensor_mesh.size()
    of_step = zip(inspect.signature(step_options).parameters, step, strict=True)
    given = [f"{name}={value!r}" for name, value in [*of_step, *options.items()]]
    return [*given, f"mp_policy={policy}", f"mesh {shape}", f"tensor parallelism over {slot} ranks"]


def _facts_of(
    model: nn.Module, leaves: list[Leaf], table: RoutingTable, chosen: list[tuple[nn.Module, ...]]
) -> list[str]:
    """Returns what the ranks compare of the model."""
    facts = [f"{row} {parameter.dtype}" for row, parameter in zip(table, model.parameters(), strict=True)]
    divided = (leaf for leaf in leaves if leaf.num_columns > 1)
    facts += [f"'{leaf.name}' divided by experts over {leaf.num_columns} ranks" for leaf in divided]
    facts += [f"'{leaf.name}' by {leaf.slices.placement} over its slot" for leaf in leaves if leaf.slices is not None]
    names = {module: name for name, module in model.named_modules()}
    return [*facts, *(f"unit of {[names[module] for module in modules]}" for modules in chosen)]


_known_entries: set[str] = set()  # of by_class, which have fitted a model of this process, or were warned of


def _warn(ranks: Ranks, model: nn.Module, mesh: DeviceMesh | None, table: RoutingTable) -> None:
    """Warns of choices that the user may not intend, on one rank."""
    if ranks.owner != 0:
        return
    for doubt in table.doubts():
        logger.warning("dmuon: %s", doubt)
    entries = fitting_entries(model)
    unfit = [entry for entry, fits in entries.items() if not fits and entry not in _known_entries]
    _known_entries.update(entries)
    if unfit:
        logger.warning(
            "dmuon.views: %s: these entries fit nothing in this model, no module of the class or no parameter of the "
            "name, and decide nothing.",
            ", ".join(unfit),
        )
    if (roles := contradicted_by_names(mesh)) is not None:
        logger.warning(
            "dmuon: dedicate_params: mesh: dimensions are taken by position, as fully_shard takes them: %s, which is "
            "not as they are named. If the names are meant, pass a mesh of two dimensions in the order (replicate, "
            "shard).",
            roles,
        )


def one_model(model: Any) -> Any:
    """Returns `model`. Raises ValueError if it is what other optimizers take: parameters, or several models."""
    if isinstance(model, nn.Module):
        return model
    parts = list(model) if isinstance(model, list | tuple) else []
    if parts and all(isinstance(part, nn.Module) for part in parts):
        raise ValueError(
            f"Muon: model: expected one model, got {len(parts)} parts. Expected: a Muon for each part, "
            "[dmuon.Muon(part) for part in parts]."
        )
    raise ValueError(
        f"Muon: model: expected the model itself, dmuon.Muon(model), got {type(model).__name__}. Parameters that need "
        "options of their own go into muon_groups and adamw_groups. For a trainer that hands on parameters alone see "
        "docs/trainers.md."
    )
