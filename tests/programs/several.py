"""A program over all kinds of parameters that hold several matrices; random ones seldom have tied ones."""

from __future__ import annotations

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
