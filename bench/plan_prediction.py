"""Compares the plan's prediction for each rank with the time of the rank's updates in training.

    torchrun --nproc-per-node 4 bench/plan_prediction.py --mesh 2x2 --json out/bench/plan_prediction.json

In each round a new model measures costs, plans and trains. The measured time is that of a rank's batches of a step
(momentum, Newton-Schulz, update) on its compute lane, the median over steps. The plan's costs also include the cast
into the packed buffer, which training does as it publishes. On CPUs each rank stays on one core, so ranks that share
cores get equal parts of them.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dmuon._inspecting.profile import Profile

import dmuon
from bench.train_step import WARM_STEPS, Setting, arguments, conclude, prepare

Row = dict[str, float]


def keep_to_one_core() -> None:
    """Pins this process to one core. Call it before other threads exist: they inherit the core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})


def update_ms(profile: Profile, num_ranks: int) -> list[float]:
    """[rank] milliseconds of the updates of a step."""
    sums: list[list[float]] = []
    for rank in range(num_ranks):
        spans = [span for span in profile.spans if span.rank == rank]
        steps = [span for span in spans if span.kind == "optimizer step"]
        updates = [span for span in spans if span.lane == "update"]
        sums.append(
            [1e3 * sum(u.done - u.started for u in updates if step.started <= u.started < step.done) for step in steps]
        )
    return [statistics.median(of_rank) for of_rank in sums]


def compare(setting: Setting, steps: int) -> list[Row]:
    """[rank] of one round."""
    contender = setting.contender("dmuon")
    contender.train(WARM_STEPS)
    with dmuon.profile(contender.model) as profile:
        contender.train(steps)
    predicted = dmuon.plan(contender.model).loads_ms
    measured = update_ms(profile, len(predicted))
    return [{"predicted_ms": p, "measured_ms": m, "ratio": p / m} for p, m in zip(predicted, measured, strict=True)]


def main() -> None:
    os.environ["DMUON_CACHE_DIR"] = ""  # costs are measured in every round
    parser = arguments(__doc__)
    parser.set_defaults(rounds=3, steps=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        keep_to_one_core()
    setting, facts = prepare(options)
    facts["design"] = f"{options.rounds} rounds of {options.steps} steps"
    rounds = [compare(setting, options.steps) for _ in range(options.rounds)]
    if setting.cluster.rank == 0:
        print("\n".join(f"{key}: {value}" for key, value in facts.items()))
        print(" rank  predicted ms  measured ms  predicted/measured: median [least, most] of rounds")
        for rank, rows in enumerate(zip(*rounds, strict=True)):
            predicted, measured, ratio = (
                [row[key] for row in rows] for key in ("predicted_ms", "measured_ms", "ratio")
            )
            print(
                f"{rank:5}  {statistics.median(predicted):12.2f}  {statistics.median(measured):11.2f}"
                f"  {statistics.median(ratio):.2f} [{min(ratio):.2f}, {max(ratio):.2f}]"
            )
    conclude(options, setting.cluster, {**facts, "rounds": rounds})


if __name__ == "__main__":
    main()
