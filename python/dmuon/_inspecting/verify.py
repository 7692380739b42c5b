"""Verification: replays a step's work and compares it with a plain computation of Muon."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
import torch.nn as nn

from dmuon import _C
from dmuon._inspecting.verified_update import PIECE, pieces, relative, update_differences
from dmuon._running.muon import Muon
from dmuon._running.runtime import Runtime, runtime_of
from dmuon._setup import user_rules
from dmuon._setup.agreement import agreement, largest
from dmuon._setup.dedication import dedication_of
from dmuon._setup.hyperparameters import rule_of
from dmuon._setup.options import dtypes_of

_UPDATE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}


@dataclasses.dataclass(frozen=True)
class Verification:
    """Largest relative differences (Frobenius) over all matrices, and their matrices. Equal on every rank.

    True as a bool if all differences are within their tolerances. Prints with a conclusion.

    Attributes:
        publication: difference of units' weights from the owner's master in the compute dtype. Must be 0.
        routing: difference of mean gradients at the owners from the owner's own computation of the mean. Expect the
            reduce dtype's rounding.
        update: difference of a Muon update in the iteration's dtype from plain fp32, without what fp32 weights round
            off. Expect that dtype's rounding.
        routing_tolerance: eight times the reduce dtype's epsilon.
        update_tolerance: depends on the iteration's dtype: 0.001 in fp32, 0.03 in fp16, 0.2 in bf16. With the rule
            "adamuon" or the user's own, or with `cautious_weight_decay`, twice the root of this, because the sign of
            elements near 0 turns by their rounding.
    """

    publication: float
    publication_of: str
    routing: float
    routing_of: str
    update: float
    update_of: str
    routing_tolerance: float
    update_tolerance: float

    @property
    def ok(self) -> bool:
        """True if every difference is within its tolerance."""
        return not self._wrong()

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if not (self.publication_of or self.routing_of or self.update_of):
            return "verdict: Muon has no matrix of this model, so nothing was compared"
        lines = [f"{'':11}  {'difference':>10}  {'tolerance':>9}  matrix"]
        lines += [
            f"{part:11}  {difference:10.2g}  {tolerance:9.2g}  {name}"
            for part, difference, name, tolerance in self._parts()
        ]
        wrong = " and ".join(self._wrong())
        conclusion = f"differ from the plain computation in {wrong}" if wrong else "agree with the plain computation"
        return "\n".join([*lines, f"verdict: dmuon's results {conclusion}"])

    def _wrong(self) -> list[str]:
        return [part for part, difference, _, tolerance in self._parts() if difference > tolerance]

    def _parts(self) -> list[tuple[str, float, str, float]]:
        return [
            ("publication", self.publication, self.publication_of, 0.0),
            ("routing", self.routing, self.routing_of, self.routing_tolerance),
            ("update", self.update, self.update_of, self.update_tolerance),
        ]


def verify(model: nn.Module, opt: Muon) -> Verification:
    """Replays one publication, routing and update of every matrix and compares each with plain fp32.

    Collective over the mesh. Gradients are synthetic, different on every rank and equal at every call. Reads the
    present weights and momentum and does not change them. Expect an `update` of some hundredths with the CPUs' bf16
    iteration, and a tenth for a very thin matrix. Needs memory for a unit's weights or gradients, and a few times for
    one matrix.

    Raises:
        ValueError: the optimizer is not this model's, gradients wait for a step, weights or momentum are not finite, or
            they are offloaded; or, over several nodes, the call is inside `no_sync`.
    """
    runtime = runtime_of(model, "verify")
    runtime.meet("verify()")
    with agreement(runtime.ranks, "verify"):
        opt = getattr(opt, "optimizer", opt)  # Accelerate and Fabric wrap it
        if not isinstance(opt, Muon) or opt._runtime is not runtime:
            raise ValueError("verify: opt: expected the dmuon.Muon of this model, got another optimizer")
        if runtime.no_sync_depth and runtime.ranks.num_replicates > 1:
            raise ValueError(
                "verify: expected a call outside of no_sync, got one inside: gradients stay in their nodes"
            )
        waiting = [p for p in runtime.placeholders if p.grad is not None]
        if waiting:
            raise ValueError(
                f"verify: model: expected no gradients that wait for a step, got {len(waiting)} matrices with some. "
                "Call it before backward, or after step() and zero_grad()."
            )
        _require_finite(runtime)
    with torch.no_grad(), torch.autocast(runtime.device.type, enabled=False):
        publication = _worst(runtime, _publication_differences(runtime))
        routing = _worst(runtime, _routing_differences(runtime))
        # A user's rule may raise at one owner. Under tensor parallelism, which has none, ranks wait for slices.
        with agreement(runtime.ranks, "verify") if runtime.ranks.tensor_parallel == 1 else nullcontext():
            differences = update_differences(runtime, opt)
        update = _worst(runtime, differences)
    for index in range(len(runtime.leaves)):
        runtime.engine.clear_gradient(index)
        runtime.placeholders[index].grad = None
    policy = dedication_of(model, "verify").mp_policy
    reduced = [dtypes_of(policy, p.dtype)[1] for p in runtime.placeholders]
    groups = [group for group in opt.param_groups if group["algorithm"] == "muon"]
    tolerances = [_UPDATE_TOLERANCE[group["ns_dtype"] or _C.default_ns_dtype(runtime.device)] for group in groups]
    rules = [rule_of(group) for group in groups]
    turns_signs = any(rule == "adamuon" or user_rules.is_users(rule) for rule in rules)
    turns_signs |= any(group.get("cautious_weight_decay") for group in groups)
    return Verification(
        *publication,
        *routing,
        *update,
        routing_tolerance=max((8 * torch.finfo(dtype).eps for dtype in reduced), default=0.0),
        update_tolerance=max((2 * math.sqrt(t) if turns_signs else t for t in tolerances), default=0.0),
    )


def _require_finite(runtime: Runtime) -> None:
    for index, leaf in enumerate(runtime.leaves):
        for name in ("master", *runtime.shards.states):
            if not all(part.tensor.isfinite().all() for part in runtime.transfers.owned_parts(index, name)):
                what = {"master": "weights", "momentum_buffer": "momentum"}.get(name, name)
                raise ValueError(f"verify: model: expected finite {what}, got a NaN or an infinity in '{leaf.name}'")


def _worst(runtime: Runtime, differences: dict[int, float]) -> tuple[float, str]:
    own, index = max(((value, index) for index, value in differences.items()), default=(0.0, -1))
    (value,) = largest(runtime.ranks, [own])
    (worst,) = largest(runtime.ranks, [index if own == value else -1])
    return value, runtime.leaves[int(worst)].name if worst >= 0 else ""


def _publication_differences(runtime: Runtime) -> dict[int, float]:
    differences: dict[int, float] = {}
    for unit in range(len(runtime.units)):
        runtime.engine.unshard(unit)
        native = runtime.engine.unit(unit)
        for leaf, view in zip(native.packing().leaves, native.weight_tensors(), strict=True):
            held = runtime.transfers.gather(leaf.index, "master")
            expected = runtime.leaves[leaf.index].own_experts(held, runtime.ranks).to(view.dtype)
            differences[leaf.index] = relative(zip(pieces(view), pieces(expected), strict=True))
        runtime.engine.reshard(unit)
    return differences


def _synthetic(runtime: Runtime, leaf: int, slot: int, piece: int, size: int) -> torch.Tensor:
    """Returns a piece of a rank's gradient for a leaf. The CPU draws its numbers, which are equal everywhere."""
    num_pieces = -(-runtime.leaves[leaf].shape.numel() // PIECE)
    generator = torch.Generator().manual_seed((leaf * runtime.ranks.num_slots + slot) * num_pieces + piece)
    return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")


def _mean_of_synthetic(runtime: Runtime, leaf: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the pieces of the mean that have elements in [begin, end), each with its begin.

    Adds the gradients of all ranks that have the leaf one after the other, so that many ranks need no more memory.
    """
    for piece, layout in enumerate(pieces(torch.empty(runtime.leaves[leaf].shape, device="meta"))):
        if not piece * PIECE < end or not begin < piece * PIECE + len(layout):
            continue
        mean = torch.zeros(layout.shape, dtype=torch.float64, device="cpu")
        for slot in _slots_with(runtime, leaf):
            mean += _synthetic(runtime, leaf, slot, piece, len(mean)) / runtime.divide_factor
        yield piece * PIECE, mean


def _mean_of_part(runtime: Runtime, leaf: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields pieces of the mean of what this rank has of a leaf: of its slice, under tensor parallelism."""
    if runtime.leaves[leaf].cut is None:
        yield from _mean_of_synthetic(runtime, leaf, begin, end)
        return
    shape = runtime.leaves[leaf].shape
    whole = torch.cat([mean for _, mean in _mean_of_synthetic(runtime, leaf, 0, shape.numel())])
    yield 0, runtime.leaves[leaf].part_of(whole.view(shape), runtime.ranks).reshape(-1)


def _slots_with(runtime: Runtime, leaf: int) -> list[int]:
    """Returns the slots whose modules have the same part of a leaf as this rank's."""
    ranks, divided = runtime.ranks, runtime.leaves[leaf].num_columns > 1
    return [slot for slot in range(ranks.num_slots) if not divided or slot % ranks.num_shards == ranks.shard]


def _alike(
    part: torch.Tensor, begin: int, pieces: Iterable[tuple[int, torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the elements of a leaf from `begin` on, with the same elements from pieces of the whole leaf."""
    flat = part.reshape(-1)
    for at, piece in pieces:
        first, last = max(at, begin), min(at + len(piece), begin + len(flat))
        yield flat[first - begin : last - begin], piece[first - at : last - at]


def _put_synthetic(runtime: Runtime, leaf: int) -> None:
    gradient = torch.empty(runtime.leaves[leaf].shape, dtype=torch.float32, device=runtime.device)
    for piece, part in enumerate(pieces(gradient)):
        part.copy_(_synthetic(runtime, leaf, runtime.ranks.slot, piece, len(part)))
    runtime.engine.put_gradient(leaf, runtime.leaves[leaf].part_of(gradient, runtime.ranks))


def _routing_differences(runtime: Runtime) -> dict[int, float]:
    differences: dict[int, float] = {}
    for index in range(len(runtime.leaves)):
        runtime.engine.clear_gradient(index)
    for index, unit in enumerate(runtime.units):
        for leaf in unit.leaves:
            _put_synthetic(runtime, leaf)
        runtime.engine.route(index)
        for leaf in unit.leaves:
            for part in runtime.transfers.owned_parts(leaf, "gradient"):
                mean = _mean_of_part(runtime, leaf, part.elements.begin, part.elements.end)
                found = relative(_alike(part.tensor, part.elements.begin, mean))
                differences[leaf] = max(differences.get(leaf, 0.0), found)
    return differences
