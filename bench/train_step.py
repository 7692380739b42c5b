"""Step time of AdamW, Muon-AG and dmuon on one small GPT, in interleaved blocks.

    torchrun --nproc-per-node 4 bench/train_step.py --mesh 2x2 --json out/bench/2x2.json

The first step of every block is not timed, see Contender.train. The ratio to AdamW is the median over
the rounds of paired block times, with its order-statistic 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.interleave import Ratio, orders, paired_ratio
from bench.muon_ag import best_orthogonalize
from bench.provenance import provenance
from bench.traffic import Traffic, read_traffic
from examples.contender import (
    LABELS,
    NAMES,
    Cluster,
    Contender,
    Rates,
    StepTimes,
    mean_times,
    open_cluster,
)
from examples.gpt import GPTConfig
from examples.text import Text, load_text

PARTS = ("step", "forward", "backward", "optimizer")
WARM_STEPS = 4
# Publication of the last step may still travel when a block ends; it is small and local.
SETTLE_S = 0.03


@dataclass
class Samples:
    """Of one contender, by round."""

    blocks: list[list[StepTimes]] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)  # of a whole block, untimed step included
    stats: dict[str, float] = field(default_factory=dict)  # dmuon's own counters, per step of rank 0

    def median_ms(self, part: str) -> float:
        seconds: list[float] = [getattr(times, part) for block in self.blocks for times in block]
        return 1e3 * statistics.median(seconds)

    def block_seconds(self) -> list[float]:
        return [statistics.fmean(times.step for times in block) for block in self.blocks]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--optim", default=",".join(NAMES), help="comma-separated, of: %(default)s")
    add("--mesh", help="RxG: R replicas of G shards; default: all ranks one row")
    add("--rounds", type=int, default=24)
    add("--steps", type=int, default=3, help="timed steps a block")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=384)
    add("--heads", type=int, default=6)
    add("--sequence", type=int, default=64)
    add("--batch", type=int, default=4, help="sequences a rank")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--json", type=Path)
    return parser.parse_args()


def counters(contender: Contender) -> dict[str, float]:
    """dmuon's statistics, whatever they are; empty for the others."""
    stats = getattr(contender.optimizer, "stats", None)
    if stats is None:
        return {}
    return {name: float(value) for name, value in stats().items() if isinstance(value, (int, float))}


def is_level(name: str) -> bool:
    """A level is reported as it is, a running total per step."""
    return name.startswith(("peak", "current"))


def measure(contenders: dict[str, Contender], options: argparse.Namespace, cluster: Cluster) -> dict[str, Samples]:
    samples = {name: Samples() for name in contenders}
    for contender in contenders.values():
        contender.train(WARM_STEPS)
    before = {name: counters(contender) for name, contender in contenders.items()}
    for order in orders(list(contenders), options.rounds):
        for name in order:
            cluster.barrier()
            time.sleep(SETTLE_S)
            start = read_traffic()
            times, _ = contenders[name].train(1 + options.steps)
            cluster.barrier()
            time.sleep(SETTLE_S)
            samples[name].traffic.append(read_traffic() - start)
            samples[name].blocks.append(mean_times(cluster.gather(times[1:])))
    num_steps = options.rounds * (1 + options.steps)
    for name, contender in contenders.items():
        for key, value in counters(contender).items():
            gained = value if is_level(key) else (value - before[name].get(key, 0.0)) / num_steps
            samples[name].stats[key] = gained
    return samples


def summarise(samples: dict[str, Samples], num_local_ranks: int, steps_a_block: int) -> dict[str, Any]:
    """Medians in ms, ratios, bytes a rank and step; `above_adamw_ms` says where the excess goes."""
    base = samples.get("adamw")
    out: dict[str, Any] = {}
    for name, one in samples.items():
        row: dict[str, Any] = {f"{part}_ms": one.median_ms(part) for part in PARTS}
        if base is not None:
            row["ratio_to_adamw"] = asdict(paired_ratio(one.block_seconds(), base.block_seconds()))
            row["above_adamw_ms"] = {part: row[f"{part}_ms"] - base.median_ms(part) for part in PARTS}
        for kind in ("intra", "inter"):
            sent = statistics.median(getattr(traffic, kind) for traffic in one.traffic)
            row[f"sent_{kind}_bytes"] = sent / num_local_ranks / steps_a_block
        row["block_seconds"] = one.block_seconds()
        row["stats"] = one.stats
        out[name] = row
    return out


def show(summary: dict[str, Any]) -> None:
    print(
        f"{'':9}{'step':>9}{'forward':>9}{'backward':>9}{'optim':>9}  {'x AdamW':22}{'MB sent: intra':>15}{'inter':>8}"
    )
    for name, row in summary.items():
        ratio = str(Ratio(**row["ratio_to_adamw"])) if "ratio_to_adamw" in row and name != "adamw" else ""
        sent = f"{row['sent_intra_bytes'] / 1e6:15.2f}{row['sent_inter_bytes'] / 1e6:8.2f}"
        print(f"{LABELS[name]:9}" + "".join(f"{row[f'{part}_ms']:9.1f}" for part in PARTS) + f"  {ratio:22}{sent}")
    for name, row in summary.items():
        if "above_adamw_ms" in row and name != "adamw":
            parts = ", ".join(f"{part} {value:+.1f}" for part, value in row["above_adamw_ms"].items())
            print(f"{LABELS[name]} above AdamW, ms: {parts}")
    for name, row in summary.items():
        if row["stats"]:
            print(f"{LABELS[name]}'s own counters on rank 0, per step (peak_*, current_*: as they stand):")
            for key, value in row["stats"].items():
                print(f"  {key:24} {value:,.4g}" if abs(value) < 1e4 else f"  {key:24} {value:,.0f}")


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    cluster = open_cluster(options.mesh)
    config = GPTConfig(options.layers, options.width, options.heads, options.sequence)
    text = Text(load_text(None), options.batch, options.sequence, 0, cluster.device)
    facts: dict[str, Any] = dict(provenance())
    facts["mesh"] = "x".join(map(str, cluster.mesh.shape)) if cluster.mesh else "one process"
    facts["model"] = f"{config}, batch {options.batch} a rank, {options.dtype}"
    facts["design"] = f"{options.rounds} rounds of 1 + {options.steps} steps; ms are medians over timed steps"
    facts["Muon-AG iterates with"] = best_orthogonalize()[0]
    if cluster.rank == 0:
        print("\n".join(f"{key}: {value}" for key, value in facts.items()), flush=True)
    contenders = {
        name: Contender(name, config, text, cluster, dtype=options.dtype, rates=Rates())
        for name in options.optim.split(",")
    }
    samples = measure(contenders, options, cluster)
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    summary = summarise(samples, num_local_ranks, 1 + options.steps)
    if cluster.rank == 0:
        show(summary)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps({**facts, "optimizers": summary}, indent=1) + "\n")
    if cluster.mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
