"""Programs that were wrong once, and random ones, are inside the contract (contract.py).

The commit chooses the random ones. A failure prints the smallest program that still fails. `make fuzz MINUTES=` plays
more of them.
"""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from contract import ASTRAY, refusal
from draw import plays
from judge import Outside, Truth, check
from program import Block, Micro, Pass, Program, Step, from_json, to_json
from several import with_each_action, with_several_matrices

pytestmark = pytest.mark.xdist_group("programs")  # one process has the ranks

NUM_RANDOM = 10
KEPT = sorted((Path(__file__).parent / "kept").glob("*.json"))


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_programs_that_were_outside_the_contract_once_are_inside(programs_pool, path):
    check(programs_pool, from_json(path.read_text()))


def seed_of_commit() -> int:
    """Others with every commit, the same ones for one; 0 outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return int(found.stdout, 16) if found.returncode == 0 else 0


@plays(NUM_RANDOM, seed_of_commit())
def test_random_programs_are_inside_the_contract(programs_pool, program):
    check(programs_pool, program)


BLOCKS = (Block(), Block("mlp"), Block("parameter"))
USUAL = Micro(Pass((0, 1, 2)))


# Beside FSDP2 its collectives have to end, too. Without it test_faults has the others.
@pytest.mark.parametrize(
    ("astray", "wrap"),
    [
        *((astray, "blocks") for astray in ASTRAY if astray != "repeats"),  # kept/a_rank_uses_a_block_once_more.json
        *((astray, "none") for astray in ("adds", "no backward", "no_sync", "no step", "clips")),
    ],
)
def test_a_rank_that_goes_astray_alone_ends_all_ranks(programs_pool, astray, wrap):
    step = Step((USUAL, USUAL) if astray in ("no backward", "no_sync") else (USUAL,))
    check(
        programs_pool,
        Program(wrap=wrap, blocks=BLOCKS, steps=(step,) * 3, astray=astray, stray=2, stray_step=1),
    )


@pytest.mark.parametrize(
    ("mesh", "division", "dtype"),
    [
        ((2, 2), "by size", "fp32"),
        ((2, 2), "all", "bf16"),
        ((4,), "all", "fp32"),
        ((4, 1), "by size", "fp32"),
        ((3,), "by size", "bf16"),
    ],
)
def test_each_of_several_matrices_in_a_parameter_is_trained_as_one_by_itself(programs_pool, mesh, division, dtype):
    check(programs_pool, with_several_matrices(mesh, division, dtype))


@pytest.mark.parametrize(("mesh", "wrap"), [((2, 2), "none"), ((4,), "blocks")])
def test_everything_after_a_step_meets_new_weights(programs_pool, mesh, wrap):
    check(programs_pool, with_each_action(mesh, wrap))


def test_a_program_comes_back_from_its_file():
    program = Program(blocks=BLOCKS, steps=(Step((USUAL,), clips=True),))
    assert from_json(to_json(program)) == program


def test_the_judge_finds_a_weight_that_is_off_and_the_contract_knows_a_skip():
    """A check of the check: one step more is not taken for the same, nor a skip in the first step for allowed."""
    program = Program(blocks=BLOCKS, steps=(Step((USUAL,)),) * 2)
    longer = Truth(dataclasses.replace(program, steps=(Step((USUAL,)),) * 3)).exact
    with pytest.raises(Outside):
        Truth(program).check(longer._replace(notes=Truth(program).notes), 0)
    skips = Pass((0, 1, 2), ((0,),))
    assert "not known" in refusal(dataclasses.replace(program, steps=(Step((Micro(skips),)),)))
    assert not refusal(dataclasses.replace(program, steps=(Step((USUAL,)), Step((Micro(skips),)))))
