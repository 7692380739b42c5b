"""What passes make known: in which order ranks use blocks, and when a pass of another order is refused."""

from __future__ import annotations

import dataclasses

from program import Block, Micro, Program, Step

Sequence = tuple[int, ...]

STEM = -1  # in an order of blocks: what no rank can skip
HAVE_SEVERAL = ("heads", "qkv", "rows", "gated", "conv", "stack", "experts", "beside", "stored")  # in one parameter
HAVE_MATRICES = ("linear", "biased", "mlp", "thin", "column", "parameter", "nested", *HAVE_SEVERAL)
HAVE_OTHERS = ("biased", "mlp", "norm", "nested", "gated")
HAVE_NO_LINEAR = ("norm", "parameter", "conv", "stack", "experts", "stored")


def managed(block: Block, wrap: str) -> bool:
    """Whether `fully_shard` manages a parameter of the block."""
    return wrap != "none" and (block.kind in HAVE_OTHERS or (block.kind in HAVE_MATRICES and not is_owned(block)))


def is_owned(block: Block) -> bool:
    """Whether dmuon moves a matrix for the block."""
    return block.kind in HAVE_MATRICES and block.frozen in ("", "others")


def trains(block: Block) -> bool:
    """Whether a parameter of the block needs a gradient."""
    return is_owned(block) or (block.kind in HAVE_OTHERS and block.frozen in ("", "matrices"))


@dataclasses.dataclass
class Known:
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
        if any(self.recomputed_twice(micro, rank, step) for rank in ranks if rank not in micro.without_backward):
            return "FSDP2 loses gradients of what a reentrant checkpoint recomputes twice"
        if len({self.managed_with_gradient(micro.forward.of(rank), step) for rank in ranks}) > 1:
            return "ranks differ in what of FSDP2's needs a gradient"
        orders = [self.moved(self.with_gradient(micro.forward.of(rank), step)) for rank in ranks]
        stem = () if self.program.frozen_stem else (STEM,)
        if micro.backward == "inputs":  # goes no further than to the first block that has a matrix
            first = [next((at for at, use in enumerate(order) if self.has_inputs(use, step)), None) for order in orders]
            stem = stem if None in first else ()
            orders = [order[at:] for order, at in zip(orders, first, strict=True)]
        return self.run_backward(micro, step, [order[::-1] + stem for order in orders], last)

    def run_backward(self, micro: Micro, step: Step, orders: list[Sequence], last: bool) -> str:
        if self.program.second == "joint" and len(set(orders)) > 1:
            return "ranks differ in one backward of two models"
        if micro.backward == "two forwards":
            orders = [order * 2 for order in orders]
        without = [rank for rank in micro.without_backward if rank < self.program.size]
        if without and len(without) < self.program.size:
            if self.program.wrap != "none":
                return "a rank without a backward leaves FSDP2 waiting"
            twice = micro.backward == "retained" or (self.program.second and step.ends != "closure")
            if self.backward is None or not last or twice or micro.zeroed:
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
        return tuple(index for index in order if managed(blocks[index], wrap) or is_owned(blocks[index]))

    def recomputed_twice(self, micro: Micro, rank: int, step: Step) -> bool:
        """Whether a module that FSDP2 has by itself is, in one backward."""
        if self.program.wrap != "inner":
            return False
        uses = micro.forward.of(rank) * (2 if micro.backward == "two forwards" else 1)
        recomputed = [
            index
            for place, index in enumerate(uses)
            if self.program.blocks[index].checkpoint == "reentrant"
            and self.program.blocks[index].kind not in HAVE_NO_LINEAR
            and managed(self.program.blocks[index], "inner")
            and self.needs_gradient(uses[:place], step)
        ]
        return len(set(recomputed)) < len(recomputed)

    def has_inputs(self, index: int, step: Step) -> bool:
        return is_owned(self.program.blocks[index]) and index not in step.frozen

    def needs_gradient(self, before: Sequence, step: Step) -> bool:
        """What comes out of the blocks before."""
        return not self.program.frozen_stem or bool(self.with_gradient(before, step))

    def managed_with_gradient(self, order: Sequence, step: Step) -> tuple[tuple[int, bool], ...]:
        """Of the blocks that FSDP2 manages, whether their inputs need a gradient: when it reduces depends on it."""
        blocks, wrap = self.program.blocks, self.program.wrap
        return tuple(
            (index, self.needs_gradient(order[:place], step))
            for place, index in enumerate(order)
            if managed(blocks[index], wrap)
        )

    def with_gradient(self, order: Sequence, step: Step) -> Sequence:
        """Those whose output needs a gradient."""
        flows = not self.program.frozen_stem
        found = []
        for index in order:
            block = self.program.blocks[index]  # a reentrant checkpoint of what needs none gives none
            flows = flows or (trains(block) and index not in step.frozen and block.checkpoint != "reentrant")
            if flows:
                found.append(index)
        return tuple(found)

    def after(self, known: Sequence | None, orders: list[Sequence], kind: str) -> tuple[Sequence | None, str]:
        """(The order known after a pass of these, why it is refused.)"""
        if known is None:
            return orders[0], "" if len(set(orders)) == 1 else f"ranks differ in a {kind} whose order is not known"
        ways = {self.follow(known, order) for order in orders}
        if len(ways) > 1:
            return known, f"ranks differ in a {kind} of another order, or skip what FSDP2 manages"
        return None if ways.pop().leaves else known, ""

    def follow(self, known: Sequence, order: Sequence) -> _Way:
        """How a rank's pass goes along the known order."""
        place = 0

        def manages(begin: int) -> int:
            """The next block that FSDP2 manages, or the end."""
            blocks, wrap = self.program.blocks, self.program.wrap
            after = range(begin, len(known))
            return next((at for at in after if known[at] != STEM and managed(blocks[known[at]], wrap)), len(known))

        for position, block in enumerate(order):
            if block not in known[place:]:
                return _Way(True, place, order[position:])
            if known.index(block, place) > manages(place):
                return _Way(True, manages(place), order[position:])
            place = known.index(block, place) + 1
        return _Way(False, manages(place), ())


@dataclasses.dataclass(frozen=True)
class _Way:
    """All that must be alike on all ranks in a pass whose order is known."""

    leaves: bool  # the known order, at `place`; if not, `place` is the first that it leaves out of what FSDP2 manages
    place: int
    rest: Sequence  # what follows then
