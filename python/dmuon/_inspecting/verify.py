"""Is it really Muon? A replay against a plain computation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn as nn

from dmuon import _C, _plan
from dmuon._running.muon import Muon
from dmuon._running.runtime import Runtime, runtime_of
from dmuon._setup.agreement import agreement, largest
from dmuon._setup.dedication import dedication_of
from dmuon._setup.hyperparameters import native_group, resolved_coefficients
from dmuon._setup.options import dtypes_of

_PIECE = 1 << 20  # elements that are compared, or drawn, at once
_UPDATE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.2}


@dataclasses.dataclass(frozen=True)
class Verification:
    """Largest relative differences (Frobenius) over all matrices, and the matrix that has each; equal on every rank.

    It is true where all are within their tolerances, and prints with a verdict.

    Attributes:
        publication: weights as units see them, against the owner's master in the compute dtype; 0 if all is well.
        routing: mean gradients at the owners, against the same mean computed by the owner alone; rounding
            of the reduce dtype.
        update: one Muon update in the iteration's dtype, against plain fp32; rounding of that dtype.
        routing_tolerance: eight times the reduce dtype's epsilon.
        update_tolerance: 0.001 for an iteration in fp32, 0.03 in fp16, 0.2 in bf16.
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
        """Whether every difference is within its tolerance."""
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
        verdict = f"differ from the plain computation in {wrong}" if wrong else "agree with the plain computation"
        return "\n".join([*lines, f"verdict: dmuon's results {verdict}"])

    def _wrong(self) -> list[str]:
        return [part for part, difference, _, tolerance in self._parts() if difference > tolerance]

    def _parts(self) -> list[tuple[str, float, str, float]]:
        return [
            ("publication", self.publication, self.publication_of, 0.0),
            ("routing", self.routing, self.routing_of, self.routing_tolerance),
            ("update", self.update, self.update_of, self.update_tolerance),
        ]


def plain_muon_update(
    weight: torch.Tensor,
    momentum: torch.Tensor,
    gradient: torch.Tensor,
    group: dict[str, object],
    rows: Sequence[Sequence[float]],
) -> torch.Tensor:
    """The change of one fp32 weight by Muon, as the formulas have it: no batches, no symmetry, no owner.

    Shares nothing with the engine but the hyperparameters.
    """
    mu, lr, eps = (float(group[key]) for key in ("momentum", "lr", "eps"))  # type: ignore[arg-type]
    momentum = momentum + (1 - mu) * (gradient - momentum)
    x = gradient + mu * (momentum - gradient) if group["nesterov"] else momentum
    x = x.double()
    x = (x / max(float(x.norm()), eps, 1e-300)).float()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for a, b, c in rows:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.T if tall else x
    m, n = weight.shape
    ratio = {
        "original": math.sqrt(max(1.0, m / n)),
        "match_rms_adamw": 0.2 * math.sqrt(max(m, n)),
        "spectral_unclamped": math.sqrt(m / n),
    }[str(group["adjust_lr_fn"] or "original")]
    return -lr * float(group["weight_decay"]) * weight - lr * ratio * x  # type: ignore[arg-type]


def verify(model: nn.Module, opt: Muon) -> Verification:
    """Replays one publication, routing and update of every matrix and compares each with plain fp32.

    Collective over the mesh. Gradients are synthetic, different on every rank and the same at every call; weights and
    momentum are the present ones and stay as they are. With the CPUs' bf16 iteration expect an `update` of some
    hundredths (a tenth for a very thin matrix). Memory: a unit's weights or gradients, and a few times a matrix.

    Raises:
        ValueError: the optimizer is not this model's, gradients wait for a step, or weights or momentum are not
            finite.
    """
    runtime = runtime_of(model, "verify")
    runtime.engine.meet("verify")
    with agreement(runtime.ranks, "verify"):
        opt = getattr(opt, "optimizer", opt)  # inside of Accelerate's wrapper, or Fabric's
        if not isinstance(opt, Muon) or opt._runtime is not runtime:
            raise ValueError("verify: opt: expected the dmuon.Muon of this model, got another optimizer")
        waiting = [p for p in runtime.placeholders if p.grad is not None]
        if waiting:
            raise ValueError(
                f"verify: model: expected no gradients that wait for a step, got {len(waiting)} matrices with some. "
                "Call it before backward, or after step() and zero_grad()."
            )
        _require_finite(runtime)
    with torch.no_grad():
        publication = _worst(runtime, _publication_differences(runtime))
        routing = _worst(runtime, _routing_differences(runtime))
        update = _worst(runtime, _update_differences(runtime, opt))
    for index in range(len(runtime.leaves)):
        runtime.engine.clear_gradient(index)
        runtime.placeholders[index].grad = None
    policy = dedication_of(model, "verify").mp_policy
    reduced = [dtypes_of(policy, p.dtype)[1] for p in runtime.placeholders]
    iterated = [g["ns_dtype"] or _C.default_ns_dtype(runtime.device) for g in opt.param_groups if "ns_dtype" in g]
    return Verification(
        *publication,
        *routing,
        *update,
        routing_tolerance=max((8 * torch.finfo(dtype).eps for dtype in reduced), default=0.0),
        update_tolerance=max((_UPDATE_TOLERANCE[dtype] for dtype in iterated), default=0.0),
    )


def _require_finite(runtime: Runtime) -> None:
    for index, leaf in enumerate(runtime.leaves):
        for name in ("master", "momentum_buffer"):
            if not all(part.isfinite().all() for *_, part in runtime.engine.owned_parts(index, name)):
                what = "weights" if name == "master" else "momentum"
                raise ValueError(f"verify: model: expected finite {what}, got a NaN or an infinity in '{leaf.name}'")


def _worst(runtime: Runtime, differences: dict[int, float]) -> tuple[float, str]:
    own, index = max(((value, index) for index, value in differences.items()), default=(0.0, -1))
    (value,) = largest(runtime.ranks, [own])
    (worst,) = largest(runtime.ranks, [index if own == value else -1])
    return value, runtime.leaves[int(worst)].name if worst >= 0 else ""


def _pieces(whole: torch.Tensor) -> Sequence[torch.Tensor]:
    pieces: Sequence[torch.Tensor] = whole.reshape(-1).split(_PIECE)
    return pieces


def _relative(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """|found - expected| / |expected| in fp64, of tensors that come in pieces."""
    squares = torch.zeros(2, dtype=torch.float64, device="cpu")
    for part, of in pairs:
        of = of.to(part.device, torch.float64)
        squares = squares.to(part.device) + torch.stack([(part - of).square().sum(), of.square().sum()])
    difference, whole = squares.sqrt().tolist()
    value = difference / max(whole, 1e-30)
    return value if math.isfinite(value) else math.inf  # a NaN would lose every comparison


def _publication_differences(runtime: Runtime) -> dict[int, float]:
    differences: dict[int, float] = {}
    for unit in range(len(runtime.units)):
        runtime.engine.unshard(unit)
        for leaf, view in zip(runtime.engine.packed_order(unit), runtime.engine.weights(unit), strict=True):
            expected = runtime.local(leaf, runtime.engine.gather(leaf, "master")).to(view.dtype)
            differences[leaf] = _relative(zip(_pieces(view), _pieces(expected), strict=True))
        runtime.engine.reshard(unit)
    return differences


def _synthetic(runtime: Runtime, leaf: int, slot: int, piece: int, size: int) -> torch.Tensor:
    """A piece of the gradient that a rank has of a leaf: numbers of the CPU's, which are the same everywhere."""
    num_pieces = -(-runtime.leaves[leaf].shape.numel() // _PIECE)
    generator = torch.Generator().manual_seed((leaf * runtime.ranks.size + slot) * num_pieces + piece)
    return torch.randn(size, generator=generator, device="cpu")


def _mean_of_synthetic(runtime: Runtime, leaf: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The pieces of the mean that have elements in [begin, end), and where each begins.

    The gradients of all ranks that have the leaf are added one after the other, so that many take no more memory.
    """
    for piece, layout in enumerate(_pieces(torch.empty(runtime.leaves[leaf].shape, device="meta"))):
        if not piece * _PIECE < end or not begin < piece * _PIECE + len(layout):
            continue
        mean = torch.zeros(layout.shape, dtype=torch.float64, device="cpu")
        for slot in runtime.slots_with(leaf):
            mean += _synthetic(runtime, leaf, slot, piece, len(mean)) / runtime.divide_factor
        yield piece * _PIECE, mean


def _alike(
    part: torch.Tensor, begin: int, pieces: Iterable[tuple[int, torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The elements of a leaf from `begin` on, and the same ones of pieces of all of it."""
    flat = part.reshape(-1)
    for at, piece in pieces:
        first, last = max(at, begin), min(at + len(piece), begin + len(flat))
        yield flat[first - begin : last - begin], piece[first - at : last - at]


def _put_synthetic(runtime: Runtime, leaf: int) -> None:
    gradient = torch.empty(runtime.leaves[leaf].shape, device=runtime.device)
    for piece, part in enumerate(_pieces(gradient)):
        part.copy_(_synthetic(runtime, leaf, runtime.ranks.slot, piece, len(part)))
    runtime.engine.put_gradient(leaf, runtime.local(leaf, gradient))


def _routing_differences(runtime: Runtime) -> dict[int, float]:
    differences: dict[int, float] = {}
    for index in range(len(runtime.leaves)):
        runtime.engine.clear_gradient(index)
    for index, unit in enumerate(runtime.units):
        for leaf in unit.leaves:
            _put_synthetic(runtime, leaf)
        runtime.engine.route(index)
        for leaf in unit.leaves:
            for _, begin, end, received in runtime.engine.owned_parts(leaf, "gradient"):
                mean = _mean_of_synthetic(runtime, leaf, begin, end)
                found = _relative(_alike(received, begin, mean))
                differences[leaf] = max(differences.get(leaf, 0.0), found)
    return differences


def _matrices_of(part: torch.Tensor, item: _plan.Parameter) -> Iterator[torch.Tensor]:
    """What is orthogonalised of [num_matrices, rows, cols], each as [out, in]."""
    for stacked in part:
        for matrix in stacked.chunk(item.column_blocks, dim=1):
            yield matrix.T if item.transposed else matrix


def _update_differences(runtime: Runtime, opt: Muon) -> dict[int, float]:
    differences: dict[int, float] = {}
    for group in opt.param_groups:
        if group["algorithm"] != "muon":
            continue
        native = native_group(group, runtime.device, runtime.tuned)
        rows = resolved_coefficients(group["ns_coefficients"], group["ns_steps"])
        for parameter in group["params"]:
            leaf = opt._leaf_of[parameter]
            names = ("master", "momentum_buffer", "gradient")
            for parts in zip(*(runtime.engine.owned_parts(leaf, name) for name in names), strict=True):
                item = runtime.plan.native.inventory[parts[0][0]]
                sizes = item.num_matrices, item.rows, item.cols
                master, momentum, gradient = (part[-1].view(sizes) for part in parts)
                updated = master.clone()
                applies = torch.ones((), dtype=torch.bool, device=updated.device)
                layout = item.column_blocks, item.transposed
                _C.muon_update(updated, momentum.clone(), gradient, native, applies, *layout)
                tensors = (_matrices_of(part, item) for part in (updated.sub_(master), master, momentum, gradient))
                for change, old, moved, slope in zip(*tensors, strict=True):
                    expected = plain_muon_update(old, moved, slope, group, rows)
                    found = _relative(zip(_pieces(change), _pieces(expected), strict=True))
                    differences[leaf] = max(differences.get(leaf, 0.0), found)
    return differences
