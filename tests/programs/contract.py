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
      first pass of each kind (training forward, evaluation, backward) makes one known; a backward in another order,
      or a forward over a block that was not in it, makes the next pass's known. Blocks in which `fully_shard`
      manages parameters are skipped by all ranks or by none, for FSDP2's own collectives must meet;
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
    return block.kind in ("biased", "mlp", "norm", "nested") or (has_matrix(block) and block.frozen in ("matrices", "all"))


def has_matrix(block: Block) -> bool:
    return block.kind not in ("norm", "empty")


def trains(block: Block) -> bool:
    """Whether a parameter of the block needs a gradient."""
    has_others = block.kind in ("biased", "mlp", "norm", "nested")
    return (has_matrix(block) and block.frozen in ("", "others")) or (has_others and block.frozen in ("", "matrices"))


@dataclasses.dataclass
class _Known:
    """The orders that the passes so far have made known: of blocks that dmuon or FSDP2 moves something for."""

    program: Program
    forward: Sequence | None = None
    evaluation: Sequence | None = None
    backward: Sequence | None = None

    def run(self, micro: Micro, step: Step, last: bool) -> str:
        """A micro-step. Returns why it is refused."""
        ranks = range(self.program.size)
        if micro.evaluation:
            orders = [self.moved(micro.evaluated.of(rank)) for rank in ranks]
            self.evaluation, reason = self.after(self.evaluation, orders, "evaluation")
            if reason:
                return reason
        orders = [self.moved(micro.forward.of(rank)) for rank in ranks]
        for _ in range(2 if micro.backward in ("two forwards", "thrown away") else 1):
            self.forward, reason = self.after(self.forward, orders, "forward")
            if reason:
                return reason
        if micro.backward == "dropped":
            return ""
        orders = [self.moved(self.with_gradient(micro.forward.of(rank), step)) for rank in ranks]
        return self.run_backward(micro, [order[::-1] for order in orders], last)

    def run_backward(self, micro: Micro, orders: list[Sequence], last: bool) -> str:
        if micro.backward == "two forwards":
            orders = [order * 2 for order in orders]
        without = [rank for rank in micro.without_backward if rank < self.program.size]
        if without and len(without) < self.program.size:
            if self.program.wrap != "none":
                return "a rank without a backward leaves FSDP2 waiting"
            if self.backward is None or not last:
                return "a rank without a backward"
            # Which takes part in the known one.
            orders = [self.backward if rank in without else order for rank, order in enumerate(orders)]
        elif without:
            return ""
        for _ in range(2 if micro.backward == "retained" else 1):
            self.backward, reason = self.after(self.backward, orders, "backward")
            if reason:
                return reason
        return ""

    def moved(self, order: Sequence) -> Sequence:
        blocks, wrap = self.program.blocks, self.program.wrap
        return tuple(
            index
            for index in order
            if managed(blocks[index], wrap) or (has_matrix(blocks[index]) and blocks[index].frozen in ("", "others"))
        )

    def with_gradient(self, order: Sequence, step: Step) -> Sequence:
        """Those whose output needs a gradient."""
        flows = not self.program.frozen_stem
        found = []
        for index in order:
            flows = flows or (trains(self.program.blocks[index]) and index not in step.frozen)
            if flows:
                found.append(index)
        return tuple(found)

    def after(self, known: Sequence | None, orders: list[Sequence], kind: str) -> tuple[Sequence | None, str]:
        """(The order known after a pass of these, why it is refused.)"""
        alike = len(set(orders)) == 1
        if known is None:
            return orders[0], "" if alike else f"ranks differ in a {kind} whose order is not known"
        follow = [self.follow(known, order, kind) for order in orders]
        if not alike and not all(one == "follows" for one in follow):
            return known, f"ranks differ in a {kind} of another order, or skip what FSDP2 manages"
        return None if follow[0] == "deviates" else known, ""

    def follow(self, known: Sequence, order: Sequence, kind: str) -> str:
        """How a rank's pass goes along the known order."""
        place, found = 0, "follows"

        def manages(begin: int, end: int) -> bool:
            return any(managed(self.program.blocks[block], self.program.wrap) for block in known[begin:end])

        for block in order:
            ahead = block in known[place:]
            if not ahead and block in known and kind != "backward" and not manages(place, len(known)):
                place, ahead, found = 0, True, "begins again"
            if not ahead or manages(place, known.index(block, place)):
                return "deviates"
            place = known.index(block, place) + 1
        return "leaves out what FSDP2 manages" if manages(place, len(known)) else found
