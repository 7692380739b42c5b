"""Programs that have more of a kind than random ones: parameters that hold several matrices, reads and writes."""

from __future__ import annotations

from after import ACTIONS
from program import Block, Micro, Options, Pass, Positions, Program, Step

BLOCKS = (
    *(Block("heads"), Block("heads", tied_to=0), Block("linear", tied_to=0), Block("qkv"), Block("gated")),
    *(Block("stack", checkpoint="non_reentrant"), Block("stack", tied_to=5), Block("experts"), Block("rows")),
    *(Block("conv", checkpoint="wrapped"), Block("beside"), Block("linear", tied_to=10), Block("stored")),
)


def with_several_matrices(mesh: Positions, division: str, dtype: str) -> Program:
    """Under no_sync, clipped, scaled, and, in fp32, saved and loaded into another division."""
    uses = Pass(tuple(range(len(BLOCKS))))
    held, usual = Micro(uses, synced=False), Micro(uses)
    if dtype == "fp32":
        steps: tuple[Step, ...] = (
            *(Step((usual,)), Step((held, usual), clips=True, reloads=True), Step((usual,), clips=True, scaled=True)),
            *(Step((held, usual), scaled=True, reloads=True), Step((usual,))),
        )
    else:
        steps = Step((held, usual), ends="discarded"), Step((held, usual), clips=True, scaled=True)
    others = Options(division="all" if division == "none" else "none", strategy="round_robin", node_copy=False)
    wrap = "none" if dtype == "fp32" else "root"
    return Program(mesh, dtype, wrap, BLOCKS, steps=steps, options=Options(division=division), others=others)


def with_each_action(mesh: Positions, wrap: str = "none") -> Program:
    """After each step another one of what may come beside its late update, before gradients are cleared."""
    usual = Micro(Pass((0, 1, 2)))
    steps = tuple(Step((usual,), after=(action,), cleared_after=1) for action in ACTIONS)
    options, others = (Options(late_updates=late) for late in (True, False))
    blocks = Block(), Block("mlp"), Block("nested")
    return Program(mesh, wrap=wrap, blocks=blocks, steps=steps, options=options, others=others)
