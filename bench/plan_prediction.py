"""What the plan predicts for each rank beside what the rank's updates take in training.

    torchrun --nproc-per-node 4 bench/plan_prediction.py --mesh 2x2 --json out/bench/plan_prediction.json

Measured: a rank's batches of a step (momentum, Newton-Schulz, update) on its compute lane, the median over steps.
The plan's costs hold the cast into the packed buffer too, which training does as it publishes.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dmuon.profile import Profile

import dmuon
from bench.train_step import WARM_STEPS, arguments, conclude, prepare


def update_ms(profile: Profile, num_ranks: int) -> list[float]:
    """[rank] milliseconds of the updates of a step."""
    sums: list[list[float]] = []
    for rank in range(num_ranks):
        spans = [span for span in profile.spans if span.rank == rank]
        steps = [span for span in spans if span.kind == "optimizer step"]
        updates = [span for span in spans if span.kind == "update"]
        sums.append(
            [1e3 * sum(u.done - u.started for u in updates if step.started <= u.started < step.done) for step in steps]
        )
    return [statistics.median(of_rank) for of_rank in sums]


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    setting, facts = prepare(options)
    contender = setting.contender("dmuon")
    contender.train(WARM_STEPS)
    with dmuon.profile(contender.model) as profile:
        contender.train(options.rounds)
    plan = dmuon.plan(contender.model)
    measured = update_ms(profile, len(plan.loads_ms))
    rows: list[dict[str, Any]] = [
        {"rank": rank, "predicted_ms": predicted, "measured_ms": found, "ratio": predicted / found if found else None}
        for rank, (predicted, found) in enumerate(zip(plan.loads_ms, measured, strict=True))
    ]
    if setting.cluster.rank == 0:
        print("\n".join(f"{key}: {value}" for key, value in facts.items()))
        print(plan)
        print(" rank  predicted ms  measured ms  predicted/measured")
        for row in rows:
            ratio = f"{row['ratio']:.2f}" if row["ratio"] is not None else "-"
            print(f"{row['rank']:5}  {row['predicted_ms']:12.2f}  {row['measured_ms']:11.2f}  {ratio:>18}")
    conclude(options, setting.cluster, {**facts, "ranks": rows})


if __name__ == "__main__":
    main()
