"""Step time of AdamW, Muon-AG and dmuon on one small GPT, in interleaved blocks.

    torchrun --nproc-per-node 4 bench/train_step.py --mesh 2x2 --json out/bench/2x2.json
    python bench/train_step.py --mesh 1  # FSDP2 on one rank

"least" is what the busiest link between nodes would take for the step's bytes, and this machine's processors for the
time of all ranks: no step is shorter if all ranks run here. "host" is the time until the host has issued a step, on a
GPU; on CPUs it is the step's time. The first step of every block is not timed, see Contender.train. The ratio to AdamW
is the median over the rounds of paired block times, with its order-statistic 95 % interval.
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
import dmuon
from bench.contender import (
    NAMES,
    Cluster,
    Contender,
    Rates,
    StepTimes,
    label_of,
    mean_times,
    open_cluster,
)
from bench.gpt import BYTES, GPTConfig, multiplies_bf16
from bench.interleave import Ratio, orders, paired_ratio
from bench.muon_ag import best_orthogonalize
from bench.provenance import provenance
from bench.text import Text, load_text
from bench.usage import Usage, processor_seconds, read_usage, wire_seconds

PARTS = ("step", "forward", "backward", "optimizer", "host")
WARM_STEPS = 4
SETTLE_S = 0.03  # for what the kernel still has to send


# Seconds that dmuon counts: of a rank waiting for communication, and of its two lanes communicating.
WAITS = {"forward": "wait_forward_s", "backward": "wait_backward_s", "step": "wait_step_s"}
LANES = {"intra": "busy_intra_s", "inter": "busy_inter_s"}


@dataclass
class Samples:
    """One contender's times, by round."""

    blocks: list[list[StepTimes]] = field(default_factory=list)
    usage: list[list[Usage]] = field(default_factory=list)  # [rank] of a whole block, untimed step included
    stats: list[dict[str, float]] = field(default_factory=list)  # [rank], not by round: dmuon's counters, per step

    def median_ms(self, part: str) -> float:
        seconds: list[float] = [getattr(times, part) for block in self.blocks for times in block]
        return 1e3 * statistics.median(seconds)

    def block_seconds(self) -> list[float]:
        return [statistics.fmean(times.step for times in block) for block in self.blocks]

    def used(self, kind: str) -> list[float]:
        """What a block used, by rank; bytes are its node's, as the kernel counts them. The median over the rounds."""
        return [statistics.median(getattr(one, kind) for one in blocks) for blocks in zip(*self.usage, strict=True)]

    def mean_stats(self) -> dict[str, float]:
        """Averages the statistics over the ranks."""
        return {key: statistics.fmean(stats[key] for stats in self.stats) for key in self.stats[0]}


@dataclass(frozen=True)
class Setting:
    """Settings that contenders share."""

    cluster: Cluster
    config: GPTConfig
    text: Text
    dtype: str

    def contender(self, name: str, **options: Any) -> Contender:
        return Contender(name, self.config, self.text, self.cluster, dtype=self.dtype, rates=Rates(), **options)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The arguments of all comparisons of training steps."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mesh", help="RxG: R replicas of G shards; default: all ranks one row")
    add("--tp", type=int, default=1, help="ranks of tensor parallelism, which share the data of one place of the mesh")
    add("--rounds", type=int, default=24)
    add("--steps", type=int, default=3, help="timed steps a block")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=384)
    add("--heads", type=int, default=6)
    add("--sequence", type=int, default=64)
    add(
        "--towers", type=int, choices=(1, 2), default=1, help="2: pi0's shape, two towers whose blocks are never called"
    )
    add("--batch", type=int, default=4, help="sequences a rank")
    add("--vocabulary", type=int, default=BYTES, help="rows of the embedding and of the head")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--json", type=Path)
    return parser


def prepare(options: argparse.Namespace) -> tuple[Setting, dict[str, Any]]:
    """The setting, and the facts about it that stand above the figures."""
    torch.set_num_threads(1)
    cluster = open_cluster(options.mesh, options.tp)
    config = GPTConfig(
        options.layers, options.width, options.heads, options.sequence, options.towers, options.vocabulary
    )
    text = Text(load_text(None), options.batch, options.sequence, 0, cluster.device)
    facts: dict[str, Any] = dict(provenance())
    facts["mesh"] = "x".join(map(str, cluster.mesh.shape)) if cluster.mesh else "one process"
    if cluster.tensor is not None:
        facts["mesh"] += f", tensor parallelism over {options.tp}"
    facts["model"] = f"{config}, batch {options.batch} a rank, {options.dtype}"
    if options.dtype == "bf16" and not multiplies_bf16():
        facts["model"] += ", products in fp32: this processor has none in bf16"
    facts["design"] = f"{options.rounds} rounds of 1 + {options.steps} steps; ms are medians over timed steps"
    return Setting(cluster, config, text, options.dtype), facts


def conclude(options: argparse.Namespace, cluster: Cluster, report: dict[str, Any]) -> None:
    """Writes the JSON and leaves the process group."""
    if cluster.rank == 0 and options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if cluster.mesh is not None:
        dist.destroy_process_group()


def counters(contender: Contender) -> dict[str, float]:
    """dmuon's statistics, whatever they are; empty for the others."""
    stats = getattr(contender.optimizer, "stats", None)
    if stats is None:
        return {}
    return {name: float(value) for name, value in stats().items() if isinstance(value, (int, float))}


def settle(contender: Contender) -> None:
    """Waits until what the last step sent has arrived: it is not the next contender's traffic."""
    if (runtime := getattr(contender.optimizer, "_runtime", None)) is not None:
        runtime.engine.drain()


def show_profile(contender: Contender, options: argparse.Namespace, cluster: Cluster) -> None:
    """Prints the communication hidden behind compute, by intervals; writes a trace and a picture beside the JSON."""
    with dmuon.profile(contender.model) as profile:
        contender.train(1 + options.steps)
    if cluster.rank != 0:
        return
    print(profile.summary())
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        profile.save_trace(options.json.with_suffix(".trace.json"))
        profile.save_picture(options.json.with_suffix(".png"), step=1)


def is_level(name: str) -> bool:
    """A level is reported as it is, a running total per step."""
    return name.startswith(("peak", "current"))


def measure(contenders: dict[str, Contender], options: argparse.Namespace, cluster: Cluster) -> dict[str, Samples]:
    samples = {name: Samples() for name in contenders}
    for contender in contenders.values():
        contender.train(WARM_STEPS)
        settle(contender)
        if (runtime := getattr(contender.optimizer, "_runtime", None)) is not None:
            runtime.engine.reset_peak()  # the first pass, which is traced, takes more
    before = {name: counters(contender) for name, contender in contenders.items()}
    for order in orders(list(contenders), options.rounds):
        for name in order:
            cluster.barrier()
            time.sleep(SETTLE_S)
            start = read_usage()
            times, _ = contenders[name].train(1 + options.steps)
            settle(contenders[name])
            cluster.barrier()
            time.sleep(SETTLE_S)
            samples[name].usage.append(cluster.gather(read_usage() - start))
            samples[name].blocks.append(mean_times(cluster.gather(times[1:])))
    num_steps = options.rounds * (1 + options.steps)
    for name, contender in contenders.items():
        gained = {
            key: value if is_level(key) else (value - before[name].get(key, 0.0)) / num_steps
            for key, value in counters(contender).items()
        }
        samples[name].stats = cluster.gather(gained)
    return samples


def summarise(samples: dict[str, Samples], steps_a_block: int, base: str = "adamw") -> dict[str, Any]:
    """Medians in ms, ratios, bytes a rank and step; `above_<base>_ms` says where the excess goes."""
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    out: dict[str, Any] = {}
    for name, one in samples.items():
        row: dict[str, Any] = {f"{part}_ms": one.median_ms(part) for part in PARTS}
        if base in samples:
            row[f"ratio_to_{base}"] = asdict(paired_ratio(one.block_seconds(), samples[base].block_seconds()))
            row[f"above_{base}_ms"] = {part: row[f"{part}_ms"] - samples[base].median_ms(part) for part in PARTS}
        for kind in ("intra", "inter"):
            sent = [node / num_local_ranks / steps_a_block for node in one.used(kind)]
            row[f"sent_{kind}_bytes"], row[f"sent_{kind}_bytes_max"] = statistics.fmean(sent), max(sent)
        wire = wire_seconds(one.used("inter"), one.used("received"))
        row["wire_ms"] = None if wire is None else 1e3 * wire / steps_a_block
        row["processors_ms"] = 1e3 * processor_seconds(one.used("cpu_s")) / steps_a_block
        row["block_seconds"] = one.block_seconds()
        row["stats"], row["mean_stats"] = one.stats[0], one.mean_stats()
        row["hidden_share"] = hidden_share(row["mean_stats"])
        out[name] = row
    return out


def hidden_share(stats: dict[str, float]) -> float | None:
    """The share of dmuon's communication time that no rank waits for; None if it is not counted."""
    if not stats.keys() >= {*WAITS.values(), *LANES.values()}:
        return None
    busy = sum(stats[key] for key in LANES.values())
    return 1 - sum(stats[key] for key in WAITS.values()) / busy if busy > 0 else None


def show_above(label: str, base: str, above: dict[str, float]) -> None:
    print(f"{label} above {base}, ms: " + ", ".join(f"{part} {value:+.1f}" for part, value in above.items()))


def show_waits(label: str, row: dict[str, Any]) -> None:
    """Prints waits; nothing if dmuon does not count them."""

    def listed(keys: dict[str, str]) -> str:
        found = {name: row["mean_stats"][key] for name, key in keys.items() if key in row["mean_stats"]}
        return ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in found.items())

    waits, lanes = listed(WAITS), listed(LANES)
    hidden = "" if row["hidden_share"] is None else f"; hidden {row['hidden_share']:.0%}"
    if waits or lanes:
        print(f"{label}, ms a step, mean over ranks: waits in {waits or '-'}; lanes busy {lanes or '-'}{hidden}")


def show(summary: dict[str, Any], base: str) -> None:
    than = f"x {label_of(base)}"
    columns = f"{'step':>9}{'forward':>9}{'backward':>9}{'optim':>9}{'host':>9}  {than:22}"
    print(f"{'':10}{columns}{'MB sent: intra, max':>21}{'inter, max':>16}{'least: wire':>13}{'processors':>12}")
    for name, row in summary.items():
        ratio = "" if name == base else str(Ratio(**row[f"ratio_to_{base}"]))
        intra, intra_max, inter, inter_max = (
            row[f"sent_{kind}_bytes{which}"] / 1e6 for kind in ("intra", "inter") for which in ("", "_max")
        )
        sent = f"{intra:14.2f}{intra_max:7.2f}{inter:9.2f}{inter_max:7.2f}"
        wire = "" if row["wire_ms"] is None else f"{row['wire_ms']:.1f}"
        least = f"{wire:>13}{row['processors_ms']:12.1f}"
        print(
            f"{label_of(name):10}"
            + "".join(f"{row[f'{part}_ms']:9.1f}" for part in PARTS)
            + f"  {ratio:22}{sent}{least}"
        )
    for name, row in summary.items():
        if name != base:
            show_above(label_of(name), label_of(base), row[f"above_{base}_ms"])
    for name, row in summary.items():
        show_waits(label_of(name), row)
        if row["stats"]:
            print(f"{label_of(name)}'s own counters on rank 0, per step (peak_*, current_*: as they stand):")
            for key, value in row["stats"].items():
                print(f"  {key:24} {value:,.4g}" if abs(value) < 1e4 else f"  {key:24} {value:,.0f}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--optim",
        default=",".join(NAMES),
        help="comma-separated, of: %(default)s, dmuon:RULE, dmuon@FOLDER (see label_of), ddp, replicated; ratios are "
        "to the first",
    )
    options = parser.parse_args()
    setting, facts = prepare(options)
    facts["Muon-AG iterates with"] = best_orthogonalize()[0]
    if setting.cluster.rank == 0:
        print("\n".join(f"{key}: {value}" for key, value in facts.items()), flush=True)
    contenders = {name: setting.contender(name) for name in options.optim.split(",")}
    base = next(iter(contenders))
    summary = summarise(measure(contenders, options, setting.cluster), 1 + options.steps, base)
    if setting.cluster.rank == 0:
        show(summary, base)
    profiled = next((contenders[name] for name in ("dmuon", "replicated") if name in contenders), None)
    if profiled is not None:
        show_profile(profiled, options, setting.cluster)
    conclude(options, setting.cluster, {**facts, "optimizers": summary})


if __name__ == "__main__":
    main()
