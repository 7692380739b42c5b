"""Trains one small GPT with AdamW, Muon-AG and dmuon side by side and compares them.

    python bench/race.py                                        # one process
    torchrun --nproc-per-node 4 bench/race.py --mesh 2x2        # HSDP: 2 replicas of 2 shards

All contenders start from the same weights, see the same batches and take turns in random order, so
that noise on the machine hits them alike. Figures, the plan and results.json go to --out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench import report
from bench.contender import LABELS, NAMES, Cluster, Contender, Rates, mean_times, open_cluster
from bench.gpt import GPTConfig
from bench.interleave import orders
from bench.memory import MemoryMeter
from bench.provenance import machine
from bench.text import Text, load_text

# Before the first timed block: dmuon traces its first step, allocators and transports warm up.
WARM_STEPS = 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--optimizers", default=",".join(NAMES), help="comma-separated, of: %(default)s")
    add("--mesh", help="G shards or RxG (R replicas of G shards); default: all ranks one row")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="of weights in forward and backward")
    add("--steps", type=int, default=34, help=f"training steps of each optimizer, {WARM_STEPS} of them to warm up")
    add("--block", type=int, default=5, help="steps in one turn")
    add("--batch", type=int, default=4, help="sequences a rank")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=192)
    add("--heads", type=int, default=6)
    add("--sequence", type=int, default=128)
    add("--lr", type=float, default=Rates.adamw, help="AdamW's peak learning rate")
    add("--muon-lr", type=float, default=Rates.muon, help="Muon's peak learning rate")
    add("--seed", type=int, default=0)
    add("--data", help="a text file; default: the sources of Python's standard library")
    add("--out", type=Path, default=Path("out/demo"))
    add("--profile", action="store_true", help="also draw when dmuon's operations ran: trace, picture, schedule")
    options = parser.parse_args()
    options.optimizers = options.optimizers.split(",")
    if not set(options.optimizers) <= set(NAMES):
        parser.error(f"--optimizers: expected some of {', '.join(NAMES)}, got {', '.join(options.optimizers)}")
    if options.width % (2 * options.heads):
        parser.error(
            f"expected a --width that heads of even size divide, got {options.width} and {options.heads} heads"
        )
    # The first step of a turn is not timed.
    if options.steps < WARM_STEPS + 2 or options.block < 2:
        parser.error(f"expected --steps >= {WARM_STEPS + 2} and --block >= 2, got {options.steps} and {options.block}")
    return options


def turns(num_steps: int, block: int) -> list[int]:
    """Steps in each turn, none of a single step."""
    lengths = [block] * (num_steps // block)
    rest = num_steps % block
    if rest == 1 and lengths:
        lengths[-1] += 1
    elif rest:
        lengths.append(rest)
    return lengths


class Bars(Progress):
    """A line of progress for each optimizer."""

    def __init__(self, console: Console, names: list[str], num_steps: int) -> None:
        columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(*columns, TextColumn("{task.fields[note]}"), console=console)
        self._ids = {name: self.add_task(LABELS[name], total=num_steps, note="") for name in names}

    def show(self, name: str, num_steps: int, note: str = "") -> None:
        self.update(self._ids[name], completed=num_steps, note=note)


def schedule(num_steps: int) -> Any:
    """Warm-up over a tenth of the steps, then down to a tenth of the peak in a straight line."""
    warm = max(1, num_steps // 10)

    def factor(step: int) -> float:
        remaining = (num_steps - step) / max(1, num_steps - warm)
        return min((step + 1) / warm, max(0.1, min(1.0, remaining)))

    return factor


def build(name: str, options: argparse.Namespace, text: Text, cluster: Cluster) -> Contender:
    config = GPTConfig(options.layers, options.width, options.heads, options.sequence)
    rates = Rates(adamw=options.lr, muon=options.muon_lr)
    contender = Contender(name, config, text, cluster, dtype=options.dtype, rates=rates, seed=options.seed)
    contender.scheduler = torch.optim.lr_scheduler.LambdaLR(contender.optimizer, schedule(options.steps))
    return contender


def start(
    options: argparse.Namespace, text: Text, cluster: Cluster, bars: Bars
) -> tuple[dict[str, Contender], dict[str, report.Record]]:
    """Builds the contenders one after the other, measuring what each adds to the memory of a rank."""
    build(options.optimizers[0], options, text, cluster).train(1)  # the libraries' own one-time memory is nobody's
    contenders, records = {}, {}
    for name in options.optimizers:
        bars.show(name, 0, "warming up")
        meter = MemoryMeter(cluster.device)
        contender = contenders[name] = build(name, options, text, cluster)
        record = records[name] = report.Record(name)
        record.losses += contender.train(WARM_STEPS // 2)[1].tolist()
        meter.settle()
        record.losses += contender.train(WARM_STEPS - WARM_STEPS // 2)[1].tolist()
        peaks = [peak for peak in cluster.gather(meter.peak_bytes()) if peak is not None]
        record.peak_bytes = max(peaks, default=None)
        bars.show(name, contender.num_steps)
    return contenders, records


def race(
    contenders: dict[str, Contender],
    records: dict[str, report.Record],
    options: argparse.Namespace,
    cluster: Cluster,
    bars: Bars,
) -> None:
    """Trains the contenders turn by turn in random order, each to its last step."""
    lengths = turns(options.steps - WARM_STEPS, options.block)
    rounds = orders(list(contenders), len(lengths), options.seed)
    for index, (length, order) in enumerate(zip(lengths, rounds, strict=True)):
        for name in order:
            contender, record = contenders[name], records[name]
            times, losses = contender.train(length)
            record.losses += losses.tolist()
            record.blocks.append(mean_times(cluster.gather(times[1:])))
            loss = contender.evaluate(8 if index + 1 == len(lengths) else 2)
            record.validation.append((contender.num_steps, loss))
            bars.show(name, contender.num_steps, f"validation loss {loss:.3f}")


def write_profile(contender: Contender, rank: int, out: Path) -> str:
    """A few more steps of dmuon, watched: trace.json, step.png, schedule.png and schedule.txt into `out`."""
    import dmuon

    with dmuon.profile(contender.model) as profile:
        contender.train(3)
    if rank == 0:
        schedule = dmuon.schedule(contender.model)
        profile.save_trace(out / "trace.json")
        profile.save_picture(out / "step.png", step=1)
        schedule.save_picture(out / "schedule.png")
        (out / "schedule.txt").write_text(f"{schedule}\n")
    return profile.summary()


def main() -> None:
    options = arguments()
    cluster = open_cluster(options.mesh)
    console = Console(quiet=cluster.rank != 0)
    console.width = max(console.width, report.TABLE_WIDTH)
    text = Text(load_text(options.data), options.batch, options.sequence, options.seed, cluster.device)
    with Bars(console, options.optimizers, options.steps) as bars:
        contenders, records = start(options, text, cluster, bars)
        race(contenders, records, options, cluster, bars)
    if cluster.rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        dmuon = contenders.get("dmuon")
        if dmuon is not None:
            plan = dmuon.optimizer.plan  # type: ignore[attr-defined]
            (options.out / "routing.txt").write_text(dmuon.routing + "\n")
            (options.out / "plan.json").write_text(plan.to_json() + "\n")
            (options.out / "plan.txt").write_text(str(plan.table()) + "\n")
        num_weights = sum(weight.numel() for weight in contenders[options.optimizers[0]].model.parameters())
        mesh = "x".join(map(str, cluster.mesh.shape)) if cluster.mesh else "one process"
        title = f"GPT, {num_weights / 1e6:.1f} M weights, {cluster.device.type}, mesh {mesh}, {options.dtype}"
        facts = {"title": title, "machine": machine(cluster.device), "command": sys.argv, "torch": torch.__version__}
        report.write(records, facts, options.out)
        console.print(report.table(records, title))
        console.print(f"peak MB: of a rank, the largest over ranks; figures and results.json in {options.out}/")
        if dmuon is not None and len(records) > 1:
            console.print("In a model of a few blocks packed buffers outweigh the state that owners save; see README.")
    if options.profile and "dmuon" in contenders:
        console.print(write_profile(contenders["dmuon"], cluster.rank, options.out), highlight=False)
    if cluster.mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
