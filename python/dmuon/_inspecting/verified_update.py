"""Compares an update by the engine with one straight from Muon's formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from dmuon import _C, _plan
from dmuon._running.muon import Muon
from dmuon._running.runtime import Runtime
from dmuon._setup import user_rules
from dmuon._setup.hyperparameters import native_group, resolved_coefficients, rule_of

PIECE = 1 << 20  # elements to compare, or to draw, at once
_NAMES = ("master", "momentum_buffer", "gradient")
_EPS = 1e-8  # of rules that divide by a second moment
_CHANGE = "verified change"  # among owned tensors

Differences = dict[int, float]  # by leaf


def pieces(whole: torch.Tensor) -> Sequence[torch.Tensor]:
    pieces: Sequence[torch.Tensor] = whole.reshape(-1).split(PIECE)
    return pieces


def relative(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], rounding: float = 0.0) -> float:
    """Returns (|found - expected| - rounding) / |expected| in fp64, at least 0, for tensors that come in pieces."""
    squares = torch.zeros(2, dtype=torch.float64, device="cpu")
    for part, of in pairs:
        of = of.to(part.device, torch.float64)
        squares = squares.to(part.device) + torch.stack([(part - of).square().sum(), of.square().sum()])
    difference, whole = squares.sqrt().tolist()
    value = max(difference - rounding, 0.0) / max(whole, 1e-30) if math.isfinite(difference) else math.inf
    return value if math.isfinite(value) else math.inf  # a NaN would lose every comparison


def plain_muon_update(
    weight: torch.Tensor,
    momentum: torch.Tensor,
    gradient: torch.Tensor,
    group: dict[str, Any],
    rows: Sequence[Sequence[float]],
    states: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Computes Muon's change of one fp32 weight straight from the formulas: no batches, no symmetry, no owner.

    Shares only the hyperparameters with the engine, and the function of a user's rule. `states` are the rule's, beside
    the momentum.
    """
    mu, lr, eps = (max(float(group[key]), 0.0) for key in ("momentum", "lr", "eps"))
    momentum = momentum + (1 - mu) * (gradient - momentum)
    x = gradient + mu * (momentum - gradient) if group["nesterov"] else momentum
    x = x.double() if rule_of(group) != "adamuon" else x.sign().double()
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
    if user_rules.is_users(rule_of(group)):
        numbers = {"lr": lr, "adjusted_lr": lr * ratio, **{key: float(group[key]) for key in ("weight_decay", "beta2")}}
        copies = [state.clone() for state in states]
        x, moves_weights = user_rules.change_of(rule_of(group), x.clone(), weight.clone(), copies, numbers)
        if moves_weights:
            return x - weight
    elif states:
        x = _changed(x, states[0], group)
    decay = lr * float(group["weight_decay"]) * weight
    if group.get("cautious_weight_decay", False):
        decay = decay * (weight * x >= 0)
    return decay.add_(x, alpha=lr * ratio).neg_()


def _changed(x: torch.Tensor, moment: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Returns the orthogonalised update as the rule changes it by its second moment."""
    by_neuron = rule_of(group) == "normuon"
    squares = x.square().mean(1, keepdim=True) if by_neuron else x.square()
    moment = moment + (1 - float(group["beta2"])) * (squares - moment)
    changed = x / (moment.sqrt() + _EPS)
    changed.mul_((x.norm() if by_neuron else math.sqrt(min(x.shape))) / changed.norm().clamp_min(_EPS))
    return changed


def update_differences(runtime: Runtime, opt: Muon) -> Differences:
    """Returns the relative differences of this rank's matrices. Owners have gradients. Collective.

    With tensor parallelism the engine makes a step, which is undone: no rank alone can update a matrix.
    """
    changes = _changes_alone if runtime.ranks.tensor_parallel == 1 else _changes_by_step
    differences: Differences = {}
    for leaf, group, item, tensors in changes(runtime, opt):
        rows = resolved_coefficients(group["ns_coefficients"], group["ns_steps"])
        for change, *operands, slope in zip(*(_matrices_of(part, item) for part in tensors), strict=True):
            old, moved, *states = operands
            expected = plain_muon_update(old, moved, slope, group, rows, states)
            # Decay and update each round the weights, and a change is the difference of rounded ones.
            rounding = torch.finfo(torch.float32).eps * float(old.norm())
            found = relative(zip(pieces(change), pieces(expected), strict=True), rounding)
            differences[leaf] = max(differences.get(leaf, 0.0), found)
    return differences


# A leaf, its group, a part of it, and of that part [num_matrices, ...] of change, master, the rule's states, gradient.
_Change = tuple[int, dict[str, Any], _plan.Parameter, Sequence[torch.Tensor]]


def _leaves(opt: Muon) -> Iterator[tuple[dict[str, Any], int]]:
    for group in opt.param_groups:
        if group["algorithm"] == "muon":
            yield from ((group, opt._runtime.leaf_of[parameter]) for parameter in group["params"])


def _changes_alone(runtime: Runtime, opt: Muon) -> Iterator[_Change]:
    """Updates a copy of each owned part."""
    for group, leaf in _leaves(opt):
        native = native_group(group, runtime.device, runtime.tuned)
        names = ("master", "gradient", *runtime.shards.states)
        for parts in zip(*(runtime.transfers.owned_parts(leaf, name) for name in names), strict=True):
            item = runtime.plan.native.inventory[parts[0].parameter]
            layout = {"column_blocks": item.column_blocks, "transposed": item.transposed}
            of_states = [sizes for _, sizes in native.state_sizes(item.rows, item.cols, **layout)]
            sizes = [[item.rows, item.cols], [item.rows, item.cols], *of_states]
            tensors = (part.tensor.view(item.num_matrices, *of) for part, of in zip(parts, sizes, strict=True))
            master, gradient, *states = tensors
            updated = master.clone()
            applies = torch.ones((), dtype=torch.bool, device=updated.device)
            moved = [state.clone() for state in states]
            own = {**layout, "others": moved[1:], "heights": item.heights}
            _C.muon_update(updated, moved[0], gradient, native, applies, **own)
            del moved  # what follows takes as much memory
            yield leaf, group, item, (updated.sub_(master), master, *states, gradient)


def _changes_by_step(runtime: Runtime, opt: Muon) -> Iterator[_Change]:
    """Steps and undoes it. Then brings one leaf after the other together, and yields what this rank orthogonalises."""
    engine, transfers, inventory = runtime.engine, runtime.transfers, runtime.plan.native.inventory
    owned = [part for leaf in range(len(runtime.leaves)) for part in _owned(runtime, leaf)]
    before = [(master.clone(), momentum.clone()) for master, momentum in owned]
    engine.owned().add(_CHANGE)
    try:
        natives: list[_C.MuonGroup] = []
        group_of = [-1] * len(inventory)
        for group, leaf in _leaves(opt):
            natives.append(native_group(group, runtime.device, runtime.tuned))
            for part in runtime.parts[leaf]:
                group_of[part] = len(natives) - 1
        torn = set(runtime.access.torn)
        runtime.access.torn |= {"model", "optimizer"}  # until all is as before
        _C.muon_step(engine, natives, group_of, torch.ones((), dtype=torch.bool, device=runtime.device))
        engine.drain()  # publications read masters
        changed = (part.tensor for leaf in range(len(runtime.leaves)) for part in transfers.owned_parts(leaf, _CHANGE))
        for change, (master, momentum), old in zip(changed, owned, before, strict=True):
            torch.sub(master, old[0], out=change)
            master.copy_(old[0])
            momentum.copy_(old[1])
        runtime.access.torn = torn
        runtime.publish()
        for group, leaf in _leaves(opt):
            wholes = [runtime.gathered(leaf, name).reshape(-1) for name in (_CHANGE, *_NAMES)]
            end = 0
            for part in runtime.parts[leaf]:
                item = inventory[part]
                sizes = item.num_matrices, item.rows, item.cols
                begin, end = end, end + math.prod(sizes)
                if runtime.plan.owner[part] == runtime.ranks.owner:
                    yield leaf, group, item, [whole[begin:end].view(sizes) for whole in wholes]
    finally:
        engine.owned().remove(_CHANGE)


def _owned(runtime: Runtime, leaf: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields master and momentum of a leaf's owned parts."""
    parts = (runtime.transfers.owned_parts(leaf, name) for name in _NAMES[:2])
    for master, momentum in zip(*parts, strict=True):
        yield master.tensor, momentum.tensor


def _matrices_of(part: torch.Tensor, item: _plan.Parameter) -> Iterator[torch.Tensor]:
    """Yields the matrices to orthogonalise in [num_matrices, rows, cols], each as [out, in]."""
    for stacked in part:
        if item.heights:
            groups = stacked.unflatten(0, (-1, sum(item.heights)))
            yield from (rows.flatten(0, 1) for rows in groups.split(item.heights, 1))
            continue
        for matrix in stacked.chunk(item.column_blocks, dim=1):
            yield matrix.T if item.transposed else matrix
