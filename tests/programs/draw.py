"""Draws programs, with Hypothesis: what fails is shrunk to the least that still fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from after import ACTIONS, AGREES
from contract import ASTRAY
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from known_orders import HAVE_SEVERAL, managed
from model import BODIES, SHARED
from program import Block, Micro, Options, Pass, Program, Step

MESHES = ((2, 2), (4,), (1, 4), (4, 1), (3,))
Draw = Any


def rarely(draw: Draw, value: Any, otherwise: Any, one_in: int = 4) -> Any:
    """Shrinks to `otherwise`."""
    return value if draw(st.integers(0, one_in - 1)) == one_in - 1 else otherwise


@st.composite
def block(draw: Draw, earlier: tuple[Block, ...], wrap: str, frozen_stem: bool) -> Block:
    kinds = [*BODIES, *HAVE_SEVERAL]
    tied_to = rarely(draw, draw(st.integers(0, len(earlier) - 1)), -1) if earlier else -1
    if tied_to >= 0 and draw(st.booleans()):  # else few could share a matrix
        kinds = [earlier[tied_to].kind]
    kind = draw(st.sampled_from(kinds))
    # Of an FSDPModule that is never called, FSDP2 gathers nothing.
    reads = wrap in ("none", "root") and not frozen_stem and rarely(draw, True, False)
    changes = draw(st.sampled_from(["in place", "data"])) if kind in SHARED and not reads else ""
    return Block(
        kind=kind,
        output=draw(st.sampled_from(["tensor", "tensor", "tuple", "dict", "dataclass"])),
        call=rarely(draw, "keyword", "positional"),
        checkpoint=draw(st.sampled_from(["", "", "", "reentrant", "non_reentrant", "wrapped"])),
        frozen=draw(st.sampled_from(["", "", "", "", "", "matrices", "others", "all"])),
        reads=reads,
        changes=rarely(draw, changes, ""),
        tied_to=tied_to,
    )


def settled(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Without what cannot be: what is frozen or tied does not change; a wrapped block is called."""
    sources = {block.tied_to for block in blocks}
    return tuple(
        dataclasses.replace(
            block,
            changes="" if block.frozen or block.tied_to >= 0 or index in sources else block.changes,
            reads=block.reads and block.checkpoint != "wrapped",
        )
        for index, block in enumerate(blocks)
    )


@dataclasses.dataclass(frozen=True)
class Frame:
    """What steps are drawn for."""

    usual: tuple[int, ...]  # the order of blocks
    blocks: tuple[Block, ...]
    wrap: str
    size: int
    second: str
    after: tuple[str, ...]  # what steps choose from, so that some of them do the same

    def may_skip(self, uses: tuple[int, ...]) -> list[int]:
        def may(block: Block) -> bool:
            return not (managed(block, self.wrap) or block.reads or block.changes)

        return [position for position, use in enumerate(uses) if may(self.blocks[use])]


@st.composite
def skips(draw: Draw, frame: Frame, uses: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Mostly of blocks that ranks may skip."""
    odd = any(block.reads or block.changes for block in frame.blocks)
    among = frame.may_skip(uses) if odd else rarely(draw, list(range(len(uses))), frame.may_skip(uses), 12)
    if not among:
        return ()
    positions = st.lists(st.sampled_from(among), max_size=len(among), unique=True)
    return tuple(tuple(sorted(draw(positions))) for _ in range(frame.size))


@st.composite
def chosen(draw: Draw, frame: Frame, first: bool) -> Pass:
    """The usual order, mostly; sometimes another, alike on all ranks; sometimes ranks skip blocks."""
    uses = frame.usual
    if draw(st.integers(0, 5)) == 5:
        uses = tuple(draw(st.lists(st.integers(0, len(frame.blocks) - 1), min_size=1, max_size=6)))
    likely = 30 if first else 2
    differs = draw(st.integers(0, likely)) == likely
    return Pass(uses, draw(skips(frame, uses)) if differs else ())


@st.composite
def micro(draw: Draw, frame: Frame, first: bool, last: bool) -> Micro:
    size = frame.size
    # FSDP2 refuses inference_mode in the first forward.
    kinds_of_evaluation = ["", "", "", "no_grad", "inference_mode"]
    # torch itself loses the gradients of later uses if `.data` is assigned in inference mode.
    no_inference = (first and frame.wrap != "none") or any(block.changes == "data" for block in frame.blocks)
    evaluation = draw(st.sampled_from(kinds_of_evaluation[: 4 if no_inference else 5]))
    kinds = ["once"] * 5 + ["two losses", "retained", "two forwards", "dropped", "thrown away"]
    if not any(block.checkpoint == "reentrant" for block in frame.blocks):  # which refuses chosen inputs
        kinds.append("inputs")
    without: tuple[int, ...] = ()
    if not frame.second and draw(st.integers(0, 9 if frame.wrap == "none" and last else 60)) == 9:
        without = tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))))
    return Micro(
        forward=draw(chosen(frame, first)),
        backward=draw(st.sampled_from(kinds)),
        synced=draw(st.booleans()) or last,
        without_backward=without,
        evaluation=evaluation,
        evaluated=draw(chosen(frame, first)) if evaluation else Pass(),
        zeroed=rarely(draw, True, False, 8),
    )


@st.composite
def step(draw: Draw, frame: Frame, first: bool) -> Step:
    num_micros = draw(st.sampled_from([1, 1, 1, 2, 3]))
    ends = draw(st.sampled_from(["step"] * 8 + ["closure", "discarded"]))
    frozen = draw(st.sets(st.integers(0, len(frame.blocks) - 1), max_size=2)) if draw(st.integers(0, 7)) == 7 else ()
    micros = tuple(
        draw(micro(frame, first and index == 0, ends != "discarded" and index == num_micros - 1))
        for index in range(num_micros)
    )
    has_inputs = any(one.backward == "inputs" for one in micros)
    if has_inputs:  # FSDP2's parameters have no gradients then
        micros = tuple(
            dataclasses.replace(one, forward=Pass(one.forward.uses), synced=True, without_backward=()) for one in micros
        )
    off = ""
    if frame.wrap != "none" and not has_inputs and draw(st.integers(0, 5)) == 5:
        flags = ["requires_gradient_sync", "requires_all_reduce", "is_last_backward"]
        off = draw(st.sampled_from(flags[: 2 if ends == "discarded" else 3]))
        if off != "requires_gradient_sync":  # else FSDP2 itself mixes gradients, or waits for a backward
            micros = tuple(dataclasses.replace(one, forward=micros[0].forward, backward="once") for one in micros)
    # A GradScaler wants a gradient on every rank.
    may_scale = ends == "step" and not any(one.backward == "dropped" or one.without_backward for one in micros)
    among = [action for action in frame.after if ends != "discarded" or action not in AGREES]
    after = tuple(draw(st.lists(st.sampled_from(among), max_size=3))) if among else ()
    return Step(
        micros=micros,
        clips=rarely(draw, True, False, 3),
        scaled=may_scale and rarely(draw, True, False),
        frozen=tuple(sorted(frozen)),
        ends=ends,
        zeroed=rarely(draw, True, False),
        off=off,
        stays_off=bool(off) and rarely(draw, True, False),
        reloads=rarely(draw, True, False, 8),
        after=after,
        cleared_after=draw(st.integers(0, len(after))),
    )


@st.composite
def options(draw: Draw) -> Options:
    return Options(
        lookahead=draw(st.sampled_from([2, 0, 1, 3, 9])),
        node_copy=draw(st.booleans()),
        reshard_after_forward=draw(st.booleans()),
        max_units_in_flight=draw(st.sampled_from([None, None, 2, 3])),
        strategy=draw(st.sampled_from(["load_balance", "round_robin", "lpt", "xor_layout", "rank0"])),
        division=draw(st.sampled_from(["by size", "none", "all"])),
        late_updates=draw(st.sampled_from([True, False, None])),
        replicated=draw(st.sampled_from([False, False, False, True])),
    )


@st.composite
def stray_programs(draw: Draw) -> Program:
    """Programs that would be trained, if one rank did not go astray in a step."""
    astray = draw(st.sampled_from(sorted(ASTRAY)))
    program = dataclasses.replace(draw(programs()), dtype="fp32", order=())
    # So that another order is one for dmuon, too.
    plain = (dataclasses.replace(block, tied_to=-1, reads=False, changes="") for block in program.blocks)
    blocks = (Block(), *plain, Block("parameter"))
    micro = Micro(forward=Pass(tuple(range(len(blocks)))))
    num_steps = draw(st.integers(2, 4))
    step = Step((micro, micro) if astray in ("no backward", "no_sync") else (micro,), clips=draw(st.booleans()))
    return dataclasses.replace(
        program,
        blocks=blocks,
        # Another model's FSDP2 collectives would come before dmuon can compare.
        second="" if astray == "no backward" and program.wrap != "none" else program.second,
        steps=(step,) * num_steps,
        astray=astray,
        stray=draw(st.integers(0, program.size - 1)),
        stray_step=draw(st.integers(0, num_steps - 2)),
    )


@st.composite
def order(draw: Draw, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """Rows whose ranks ascend in the same columns."""
    num_ranks = 3 if mesh == (3,) else 4
    ranks = draw(st.permutations(range(num_ranks))) if rarely(draw, True, False) else []
    if not ranks or len(mesh) == 1 or mesh[0] == 1:
        return tuple(ranks)
    width = mesh[1]
    columns = draw(st.permutations(range(width)))
    rows = (sorted(ranks[begin : begin + width]) for begin in range(0, num_ranks, width))
    return tuple(row[column] for row in rows for column in columns)


@st.composite
def programs(draw: Draw) -> Program:
    mesh = draw(st.sampled_from(MESHES))
    size = 3 if mesh == (3,) else 4
    num_blocks = draw(st.integers(1, 5))
    blocks: tuple[Block, ...] = ()
    wrap = draw(st.sampled_from(["none", "blocks", "root", "inner"]))
    frozen_stem = rarely(draw, True, False)
    for _ in range(num_blocks):
        blocks = (*blocks, draw(block(blocks, wrap, frozen_stem)))
    blocks = settled(blocks)
    usual = tuple(range(num_blocks))
    if draw(st.booleans()):
        usual = tuple(draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=7)))
    num_steps = draw(st.integers(1, 5))
    second = draw(st.sampled_from(["", "", "", "", "in turn", "forwards first", "joint"]))
    after = tuple(draw(st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=6, unique=True)))
    frame = Frame(usual, blocks, wrap, size, second, after)
    program = Program(
        mesh=mesh,
        order=draw(order(mesh)),
        # FSDP2 parts what two of its modules share.
        sharded_first=(wrap in ("none", "root") or all(block.tied_to < 0 for block in blocks))
        and rarely(draw, True, False),
        grouped=tuple(sorted(rarely(draw, draw(st.sets(st.integers(0, num_blocks - 1), max_size=3)), (), 3))),
        grouped_by=draw(st.sampled_from(["names", "function", "parameters"])),
        rates_as_tensors=rarely(draw, True, False),
        rule=rarely(draw, "normuon", "muon", 3),
        cautious=rarely(draw, True, False),
        wrap=wrap,
        blocks=blocks,
        frozen_stem=frozen_stem,
        second=second,
        steps=tuple(draw(step(frame, index == 0)) for index in range(num_steps)),
        options=draw(options()),
        others=draw(options()),
    )
    return in_bf16(program) if wrap != "none" and rarely(draw, True, False, 3) else program


def in_bf16(program: Program) -> Program:
    """With the same weights the same bits: so only the last step changes them.

    Later ones could not be compared: a weight that is off by less than nothing may be rounded to another one. Nor can
    what a reentrant checkpoint adds up in bf16, use by use.
    """
    # FSDP2 fixes the dtype of gradients in the first forward, by what needs one then: so nothing is frozen for a step.
    steps = [dataclasses.replace(step, frozen=()) for step in program.steps]
    earlier = (
        dataclasses.replace(
            step, ends="discarded", scaled=False, off="", after=tuple(one for one in step.after if one not in AGREES)
        )
        for step in steps[:-1]
    )
    checkpoints = {"reentrant": "non_reentrant"}
    return dataclasses.replace(
        program,
        dtype="bf16",
        blocks=tuple(
            dataclasses.replace(block, checkpoint=checkpoints.get(block.checkpoint, block.checkpoint), changes="")
            for block in program.blocks
        ),
        steps=(*earlier, steps[-1]),
    )


def any_program() -> st.SearchStrategy[Program]:
    """Mostly one in which all ranks do their part."""
    return st.one_of(programs(), programs(), programs(), programs(), stray_programs())


def plays(num_programs: int, number: int, shrinks: bool = True) -> Callable[[Any], Any]:
    """Decorates what is called with `program=`: that many, drawn from the seed `number`."""
    chosen = settings(
        max_examples=num_programs,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if shrinks else [])],
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    return lambda play: seed(number)(chosen(given(program=any_program())(play)))
