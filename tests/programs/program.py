"""A training program as plain data, so that it can be drawn, shrunk, kept in a file and played by anybody."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args, get_type_hints

Positions = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of a model: x -> x + f(x)."""

    kind: str = "linear"  # see model.BODIES
    output: str = "tensor"  # or "tuple", "dict", "dataclass"
    call: str = "positional"  # or "keyword"
    checkpoint: str = ""  # or "reentrant", "non_reentrant" (inside the block), "wrapped" (around it)
    frozen: str = ""  # or "matrices", "others", "all": from the start
    reads: bool = False  # the model computes it by its parts, and never calls it
    changes: str = ""  # or "in place", "data": it changes its matrix before it uses it
    tied_to: int = -1  # an earlier block whose matrix it uses, where both have one of the same shape


@dataclasses.dataclass(frozen=True)
class Pass:
    """A forward over blocks, by index; a rank leaves out what it skips."""

    uses: Positions = ()
    skipped: tuple[Positions, ...] = ()  # by rank, positions in `uses`; ranks beyond the end skip nothing

    def of(self, rank: int) -> Positions:
        skipped = self.skipped[rank] if rank < len(self.skipped) else ()
        return tuple(block for position, block in enumerate(self.uses) if position not in skipped)


@dataclasses.dataclass(frozen=True)
class Micro:
    """A micro-step: perhaps an evaluation, then a forward, then perhaps a backward."""

    forward: Pass = Pass()
    # "once"; "two losses" in one backward; "retained" and run a second time; "two forwards" before the backward;
    # "dropped": no rank runs a backward; "thrown away": a forward before this one is; "inputs": to the matrices of the
    # block that the forward uses first alone.
    backward: str = "once"
    synced: bool = True  # else under no_sync
    without_backward: Positions = ()  # ranks whose loss is dropped
    evaluation: str = ""  # or "no_grad", "inference_mode": one before the forward
    evaluated: Pass = Pass()
    zeroed: bool = False  # then all gradients are set to zero


@dataclasses.dataclass(frozen=True)
class Step:
    """What leads to one update of the weights."""

    micros: tuple[Micro, ...] = ()
    clips: bool = False
    scaled: bool = False  # by a GradScaler; ends in "step"
    frozen: Positions = ()  # blocks that need no gradient in this step
    # FSDP2's own flag that is off in micro-steps before the last: or "requires_gradient_sync", "requires_all_reduce",
    # "is_last_backward".
    off: str = ""
    stays_off: bool = False  # in the last micro-step too
    ends: str = "step"  # or "closure": the last micro-step is one; "discarded": the gradients are thrown away
    zeroed: bool = False  # the gradients are zeros afterwards; else none
    after: tuple[str, ...] = ()  # what is read and written then, while an update may be late: see after.ACTIONS
    cleared_after: int = 0  # of these, gradients are cleared
    # Then saves everything and goes on with new models of the other options, and so of other owners.
    reloads: bool = False


@dataclasses.dataclass(frozen=True)
class Options:
    """Of dedicate_params; no trajectory may depend on them."""

    lookahead: int = 2
    node_copy: bool = True
    reshard_after_forward: bool = True
    max_units_in_flight: int | None = None
    strategy: str = "load_balance"
    division: str = "by size"  # of stacks of matrices; or "none"; "all": every matrix by itself
    late_updates: bool | None = None
    replicated: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    mesh: Positions = (2, 2)
    dtype: str = "fp32"  # of compute; or "bf16", see draw.in_bf16
    wrap: str = "none"  # what is under fully_shard: or "root", "blocks", "inner" (what is inside blocks, too)
    blocks: tuple[Block, ...] = (Block(),)
    frozen_stem: bool = False  # so that the first block's input needs no gradient
    # Two models of the same blocks: "" for one; "in turn"; "forwards first"; "joint": one backward of both losses.
    second: str = ""
    steps: tuple[Step, ...] = ()
    options: Options = Options()
    others: Options = Options(lookahead=0)  # must give the same bits, see judge.same_bits
    astray: str = ""  # what rank `stray` does unlike the others, see contract.ASTRAY
    stray: int = 0
    stray_step: int = 0
    order: Positions = ()  # the ranks of the mesh, row after row; or ascending
    sharded_first: bool = False  # fully_shard comes before dedicate_params
    grouped: Positions = ()  # blocks whose matrices are a group with a rate of their own
    grouped_by: str = "names"  # or "function", "parameters" taken before dedicate_params
    rates_as_tensors: bool = False  # learning rates of matrices are
    rule: str = "muon"  # or "normuon"; AdaMuon turns whole signs by a rounding, so no bound would find a bug
    cautious: bool = False  # weight decay is

    @property
    def size(self) -> int:
        product = 1
        for extent in self.mesh:
            product *= extent
        return product


def to_json(program: Program) -> str:
    return json.dumps(dataclasses.asdict(program))


def from_json(text: str) -> Program:
    return _of(Program, json.loads(text))  # type: ignore[no-any-return]


def _of(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _of(hints[name], inner) for name, inner in value.items()})  # type: ignore[operator]
    if isinstance(value, list):
        return tuple(_of(get_args(kind)[0], inner) for inner in value)
    return value
