"""Plays random programs for a while: `python tests/programs/fuzz.py --minutes 10`, or `--programs 500 --seed 7`.

What fails is shrunk, printed, and kept in out/fuzz: mend it, and move its file to tests/programs/kept. Status 1:
something failed.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))

import torch
from contract import refusal
from draw import plays
from hypothesis.errors import Flaky
from judge import ANSWER_S, check, check_stock
from on_device import check_on_device
from pool import RankPool
from program import Program, from_json, to_json

HERE = Path(__file__).parent
FOUND = HERE.parent.parent / "out" / "fuzz"
A_ROUND = 100  # programs drawn of one seed


class Run:
    """Counts what was played."""

    def __init__(self, check: Callable[[Program], None], most: float, until: float, keep_going: bool) -> None:
        self.check, self.most, self.until, self.keep_going = check, most, until, keep_going
        self.played: collections.Counter[str] = collections.Counter()
        self.failing: tuple[Program, Exception] | None = None

    def over(self) -> bool:
        return self.played.total() >= self.most or time.monotonic() > self.until

    def __call__(self, program: Program) -> None:
        if self.failing is None:
            if self.over():
                return
            self.played[refusal(program)] += 1
        try:
            self.check(program)
        except Exception as error:
            if self.keep_going:
                first = str(error).strip().splitlines()
                print(f"{keep(program, error).stem}: {first[0]} ... {first[-1]}", flush=True)
                self.played["OUTSIDE THE CONTRACT"] += 1
                return
            if self.failing is None:
                print(
                    f"failed after {self.played.total()} programs: {error}\nkept as {keep(program, error)}", flush=True
                )
            self.failing = program, error
            raise


def play_round(run: Run, number: int, shrink: bool) -> None:
    """Draws up to A_ROUND programs."""

    @plays(A_ROUND, number, shrink)
    def draw(program: Program) -> None:
        run(program)

    draw()


def check_in_two_orders(pool: RankPool, program: Program) -> None:
    retains = any(micro.backward == "retained" for step in program.steps for micro in step.micros)
    # FSDP2 alone races in the second backward of one forward: what it gathers there may take memory still in use.
    if not refusal(program) and not (retains and program.wrap != "none"):
        check_on_device(pool, program, [("compute_first", 0), ("random", 1)])


def keep(program: Program, error: Exception) -> Path:
    text = to_json(program)
    FOUND.mkdir(parents=True, exist_ok=True)
    path = FOUND / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    path.write_text(text + "\n")
    path.with_suffix(".txt").write_text(f"{error}\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--programs", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-shrink", action="store_true", help="stop at the first program that fails, as drawn")
    parser.add_argument("--keep-going", action="store_true", help="keep what fails, as drawn, and go on")
    parser.add_argument("--file", type=Path, help="play this program only")
    parser.add_argument("--stock", action="store_true", help="play it with FSDP2 and AdamW, without dmuon")
    parser.add_argument("--emulated", action="store_true", help="play those that train, on the asynchronous device")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    most = float("inf") if arguments.programs is None else arguments.programs
    pool = RankPool(4, ANSWER_S, "emulated" if arguments.emulated else "cpu")
    chosen = check_stock if arguments.stock else check_in_two_orders if arguments.emulated else check
    run = Run(functools.partial(chosen, pool), most, time.monotonic() + 60 * arguments.minutes, arguments.keep_going)
    begun = time.monotonic()
    try:
        if arguments.file is not None:
            program = from_json(arguments.file.read_text())
            run.check(program)
            print(refusal(program) or "trained exactly")
            return 0
        number = arguments.seed * 1_000_000
        while not run.over():
            play_round(run, number, not arguments.no_shrink)
            number += 1
    except (AssertionError, Flaky) as error:
        print(error)
        if run.failing is not None:
            print(f"{run.failing[0]}\nkept as {keep(*run.failing)}")
        return 1
    finally:
        pool.close()
        print(f"{run.played.total()} programs in {time.monotonic() - begun:.0f} s:")
        for reason, count in run.played.most_common():
            print(f"{count:6} {reason or 'trained exactly'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
