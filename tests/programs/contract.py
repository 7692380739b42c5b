"""The contract: which training programs dmuon trains exactly, and which it refuses. There is no third kind."""

from __future__ import annotations

import dataclasses

from program import Block, Micro, Pass, Program, Step

Sequence = tuple[int, ...]

# What one rank may do unlike the others (`Program.astray`), so that they can never meet again.
ASTRAY = {
    "reorders": "uses the blocks of a forward in another order",
    "repeats": "uses a block once more",
    "adds": "runs a forward and a backward more",
    "evaluates": "runs an evaluation that the others do not",
    "no backward": "skips the backward of a micro-step that is not the last",
    "no_sync": "is under no_sync where the others are not, or the reverse",
    "no step": "leaves out a step",
    "clips": "clips where the others do not, or the reverse",
    "raises": "raises",
    "sleeps out": "ends its program early",
}


def refusal(program: Program) -> str:
    """Why dmuon must raise on every rank, within seconds; empty where it must train exactly as one process.

    Ranks do the same in every step, but for three things that they may do differently:

    - their data;
    - which blocks they skip, where all ranks use the others in an order that the passes before have made known: the
      first pass of each kind (training forward, evaluation, backward) makes one known, and a backward in another order,
      or a forward over a block that was not in it, makes the next pass's known. Blocks in which `fully_shard`
      manages parameters are not skipped: FSDP2's own collectives would not meet;
    - whether they run the last backward before a step, where `fully_shard` manages nothing and a backward's order is
      known.
    """
    if program.astray:
        return ASTRAY[program.astray]
    if reason := _inference_first(program):
        return reason
    watch = _Known(program)
    for step in program.steps:
        for index, micro in enumerate(step.micros):
            last = index == len(step.micros) - 1 and (step.ends != "discarded" or step.clips)
            if reason := watch.run(micro, step, last):
                return reason
    return ""


def _inference_first(program: Program) -> str:
    """FSDP2 makes its buffers in a module's first forward, and refuses one that made them under inference_mode."""
    made: set[int] = set()  # blocks whose buffers are made; -1: the root's
    for micro in (micro for step in program.steps for micro in step.micros):
        if micro.evaluation:
            uses = _with_buffers(micro.evaluated, program)
            if micro.evaluation == "inference_mode" and not uses <= made:
                return "FSDP2's first forward is under inference_mode"
            made |= uses
        made |= _with_buffers(micro.forward, program)
    return ""


def _with_buffers(chosen: Pass, program: Program) -> set[int]:
    if program.wrap == "none":
        return set()
    own = program.wrap != "root"
    return {-1} | {use for use in chosen.of(0) if own and managed(program.blocks[use], program.wrap)}


def managed(block: Block, wrap: str) -> bool:
    """Whether `fully_shard` manages a parameter of the block."""
    if wrap == "none":
        return False
    return block.kind in ("biased", "mlp", "norm", "nested") or (block.frozen in ("matrices", "all") and has_matrix(block))


def has_matrix(block: Block) -> bool:
    return block.kind not in ("norm", "empty")


def is_owned(index: int, blocks: tuple[Block, ...]) -> bool:
    """Whether dmuon moves a matrix for the block."""
    block = blocks[index]
    return has_matrix(block) and block.frozen not in ("matrices", "all")


def is_subsequence(part: Sequence, whole: Sequence) -> bool:
    rest = iter(whole)
    return all(block in rest for block in part)


@dataclasses.dataclass
class _Known:
    """The orders that the passes so far have made known, of blocks with owned matrices."""

    program: Program
    forward: Sequence | None = None
    evaluation: Sequence | None = None
    backward: Sequence | None = None

    def run(self, micro: Micro, step: Step, last: bool) -> str:
        """A micro-step. Returns why it is refused."""
        program = self.program
        ranks = range(program.size)
        for chosen in (micro.forward, micro.evaluated if micro.evaluation else Pass()):
            for skipped in chosen.skipped[: program.size]:
                blocks = [program.blocks[chosen.uses[position]] for position in skipped]
                unlike = len({chosen.of(rank) for rank in ranks}) > 1
                if unlike and any(managed(block, program.wrap) for block in blocks):
                    return "a rank skips parameters of FSDP2"
        if micro.evaluation:
            orders = [self.owned(micro.evaluated.of(rank)) for rank in ranks]
            self.evaluation, reason = after_forward(self.evaluation, orders)
            if reason:
                return reason
        orders = [self.owned(micro.forward.of(rank)) for rank in ranks]
        for _ in range(2 if micro.backward in ("two forwards", "thrown away") else 1):
            self.forward, reason = after_forward(self.forward, orders)
            if reason:
                return reason
        if micro.backward == "dropped":
            return ""
        return self.run_backward(micro, orders, last)

    def run_backward(self, micro: Micro, orders: list[Sequence], last: bool) -> str:
        backward = [order[::-1] * (2 if micro.backward == "two forwards" else 1) for order in orders]
        without = [rank for rank in micro.without_backward if rank < self.program.size]
        if without and len(without) < self.program.size:
            if self.program.wrap != "none":
                return "a rank without a backward leaves FSDP2 waiting"
            if self.backward is None or not last:
                return "a rank without a backward"
            backward = [order for rank, order in enumerate(backward) if rank not in without]
            if not all(is_subsequence(order, self.backward) for order in backward):
                return "a rank without a backward where the others run one in a new order"
        elif without:
            return ""
        for _ in range(2 if micro.backward == "retained" else 1):
            self.backward, reason = after_backward(self.backward, backward)
            if reason:
                return reason
        return ""

    def owned(self, order: Sequence) -> Sequence:
        return tuple(index for index in order if is_owned(index, self.program.blocks))


def after_forward(known: Sequence | None, orders: list[Sequence]) -> tuple[Sequence | None, str]:
    """(The order known afterwards, why it is refused.)"""
    alike = len(set(orders)) == 1
    if known is None:
        return orders[0], "" if alike else "ranks differ in a forward whose order is not known"
    if all(is_subsequence(order, known) for order in orders):
        return known, ""
    if not alike:
        return known, "ranks differ in a forward of another order"
    return known if set(orders[0]) <= set(known) else None, ""


def after_backward(known: Sequence | None, orders: list[Sequence]) -> tuple[Sequence | None, str]:
    """Likewise; the order of a backward that is not the known one is not kept, but the next one's is."""
    alike = len(set(orders)) == 1
    if known is None:
        return orders[0], "" if alike else "ranks differ in a backward whose order is not known"
    if all(is_subsequence(order, known) for order in orders):
        return known, ""
    return None, "" if alike else "ranks differ in a backward of another order"
