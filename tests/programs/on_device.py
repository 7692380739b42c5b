"""Plays programs on the asynchronous device: no race, no bit that depends on what happens when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from judge import Truth, check_same_bits
from play import Outcome, play
from pool import RankPool
from program import Program
from sides import Dmuon

ORDERS = ("compute_first", "side_first", "random", "issue_order")


def on_device(mesh: Any, program: Program, order: str, seed: int) -> tuple[Outcome, list[str]]:
    import async_device

    async_device.reset()
    async_device.configure(order=order, seed=10 * seed + mesh.get_rank())
    return play(program, Dmuon(mesh, program, program.options, program.others)), async_device.races()


def check_on_device(pool: RankPool, program: Program, runs: Iterable[tuple[str, int]]) -> None:
    """Holds it to the weights of one process in these orders of events, with these seeds; it must not be refused."""
    truth, first = Truth(program), None
    for order, seed in runs:
        answers = pool.run(on_device, program.mesh, program=program, order=order, seed=seed)
        found = [race for _, races in answers for race in races]
        assert not found, f"{order}, seed {seed}: {len(found)} races, first: {found[0]}"
        outcomes = [outcome for outcome, _ in answers]
        truth.check_all(outcomes)
        first = first or outcomes[0]
        check_same_bits(first, outcomes[0], f"in order {order}, seed {seed}, than in the first order")
