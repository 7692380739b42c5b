"""Predicts training steps on this machine from its own rates, and compares them with real ones.

    torchrun --nproc-per-node 4 bench/simulate.py --mesh 2x2
    tools/cluster --nodes 2 --ranks 2 --rate 1gbit -- bench/simulate.py --mesh 2x2
    tools/cluster --nodes 2 --ranks 2 --rate 1gbit -- bench/simulate.py --mesh 2x2 --replicated

Rates are measured first, on all ranks at once, because they share the machine in training too. These are the rates of
the bare model's forward and backward, of fused AdamW on a shard, of gathers and sums of a block's size along rows and
columns, and of a small sum along columns behind a block's gradients. The plan has measured updates. Then AdamW and
dmuon train in turns: under FSDP2, or with --replicated in place of DistributedDataParallel and under it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import dmuon
from bench.contender import LABELS
from bench.gpt import GPT, GPTConfig
from bench.train_step import Setting, arguments, conclude, measure, prepare, summarise
from dmuon import _plan

_REPEATS = 7
_SHORT_REPEATS = 41  # of what takes a few milliseconds, as ranks take turns on their processors
_BEGUN_S = 0.005  # after which a message is on its way
WORK = ("intra", "inter", "update")  # lanes


def seconds(setting: Setting, work: Callable[[], object], repeats: int = _REPEATS) -> float:
    """The median time of work that all ranks do at once, mean over ranks."""
    times = []
    for _ in range(repeats):
        setting.cluster.barrier()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.fmean(setting.cluster.gather(statistics.median(times[1:])))


def described(config: GPTConfig) -> _plan.Model:
    """The model with the FLOPs of its attention."""
    inventory = dmuon.inventory(GPT(config))
    for unit in inventory["units"]:
        unit["attention_width"] = config.width
    inventory["training"]["sequence"] = config.sequence
    return _plan.model_from_json(json.dumps(inventory))


def compute_seconds(setting: Setting, batch: int) -> float:
    """A forward and a backward of the bare model, whose ranks meet at every block, as messages make them.

    Ranks that share cores and meet often take longer than ranks that do not meet: cores idle before each meeting.
    """
    model = GPT(setting.config)
    if setting.dtype == "bf16":
        model = model.to(torch.bfloat16)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: setting.cluster.barrier())
        block.register_full_backward_hook(lambda *_: setting.cluster.barrier())
    tokens, targets = setting.text.train_batch(0, setting.cluster.part)
    assert len(tokens) == batch

    def work() -> None:
        logits = model(tokens)
        F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        model.zero_grad()

    return seconds(setting, work)


def adamw_bytes_per_second(setting: Setting, elements: int) -> float:
    weight = torch.nn.Parameter(torch.zeros(elements))
    weight.grad = torch.zeros(elements)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return _plan.ADAMW_BYTES * elements / seconds(setting, lambda: optimizer.step(), _SHORT_REPEATS)


def gather_seconds(setting: Setting, group: dist.ProcessGroup, elements: int) -> float:
    part = torch.zeros(elements // group.size(), dtype=torch.bfloat16)
    wholes = [torch.zeros_like(part) for _ in range(group.size())]
    return seconds(setting, lambda: dist.all_gather(wholes, part, group=group), _SHORT_REPEATS)


def scatter_seconds(setting: Setting, group: dist.ProcessGroup, elements: int) -> float:
    part = torch.zeros(elements // group.size())
    parts = [torch.zeros_like(part) for _ in range(group.size())]
    return seconds(setting, lambda: dist.reduce_scatter(part, parts, group=group), _SHORT_REPEATS)


def sum_seconds(setting: Setting, group: dist.ProcessGroup, elements: int) -> float:
    values = torch.zeros(elements)
    return seconds(setting, lambda: dist.all_reduce(values, group=group))


def host_sum_seconds(setting: Setting) -> float:
    """A sum of a few bytes along a column, whose members have begun to send each other a block's gradients.

    The kernel queues most of a message as it begins, and less when it has found the link's rate.
    """
    mesh, width = setting.cluster.mesh, setting.config.width
    assert mesh is not None
    column = mesh.get_group(0)
    bulk = init_device_mesh("cpu", tuple(mesh.shape)).get_group(0)  # with connections of its own
    peers = [dist.get_global_rank(column, peer) for peer in range(column.size()) if peer != column.rank()]
    few, sent = torch.zeros(width), torch.zeros(12 * width**2 // mesh.size())

    def route_and_sum() -> float:
        setting.cluster.barrier()
        work = [dist.irecv(torch.zeros_like(sent), peer, group=bulk) for peer in peers]
        work += [dist.isend(sent, peer, group=bulk) for peer in peers]
        time.sleep(_BEGUN_S)
        begin = time.perf_counter()
        dist.all_reduce(few, group=column)
        elapsed = time.perf_counter() - begin
        for one in work:
            assert one is not None
            one.wait()
        return elapsed

    times = [route_and_sum() for _ in range(_REPEATS)]
    return statistics.fmean(setting.cluster.gather(statistics.median(times[1:])))


def absorbed_percent(step_s: float, alone_s: float, work_s: float) -> float:
    """How much of the time of messages and updates does not show in a step: it is longer than modules by the rest."""
    return 100 * (1 - (step_s - alone_s) / work_s)


def measured_rates(
    setting: Setting, model: _plan.Model, batch: int, replicated: bool
) -> tuple[list[_plan.Device], _plan.Network]:
    """The rates of a rank under AdamW, its rates under dmuon, and the network.

    gloo adds up more slowly than it gathers. AdamW has it add up, dmuon adds up what it has received.
    """
    config, mesh = setting.config, setting.cluster.mesh
    assert mesh is not None
    device = _plan.device("cpu")
    num_tokens = batch * config.sequence
    device.training_tflops = 3 * model.forward_flops(num_tokens) / compute_seconds(setting, batch) / 1e12
    block = 12 * config.width**2
    blocks = block * config.num_layers
    row = mesh.get_group(mesh.ndim - 1)
    device.elementwise_gb_per_s = adamw_bytes_per_second(setting, blocks // row.size()) / 1e9
    small, whole = (gather_seconds(setting, row, count) for count in (row.size(), blocks))
    device.launch_us = 1e6 * small / 2 / (row.size() - 1).bit_length()
    received = 2 * blocks * (row.size() - 1) / row.size()
    gather = max(whole - small, 1e-6)
    device.link_gb_per_s = received / gather / 1e9
    baseline = _plan.device("cpu")
    for name in ("training_tflops", "elementwise_gb_per_s", "launch_us"):
        setattr(baseline, name, getattr(device, name))
    if replicated:  # 4 bytes of an element are summed, there and back
        busy = sum_seconds(setting, row, blocks) - small
    else:  # a step gathers 2 bytes of an element twice, and scatters 4
        busy = 2 * gather + scatter_seconds(setting, row, blocks) - small
    baseline.link_gb_per_s = 4 * received / max(busy, 1e-6) / 1e9
    devices = [baseline, device]
    if mesh.ndim == 1:
        return devices, _plan.network(device.network)
    column = mesh.get_group(0)
    part = block // row.size()
    small, whole = (sum_seconds(setting, column, count) for count in (1, part))
    sent = 2 * 4 * part * (column.size() - 1) / column.size() * row.size()  # of a node, whose ranks share its adapter
    latency_us = 1e6 * small / 2 / (column.size() - 1).bit_length()
    return devices, _plan.Network("measured", sent / max(whole - small, 1e-6) / 1e9, latency_us, per_device=False)


def row_of(predicted: float, measured: float, unit: str) -> dict[str, Any]:
    """Errors are shares; of percents they are points."""
    error = (predicted - measured) / (100 if unit == "%" else measured)
    return {"predicted": predicted, "measured": measured, "error": error, "unit": unit}


def compare(setting: Setting, options: Any) -> dict[str, Any]:
    model = described(setting.config)
    base, own = pair = ("ddp", "replicated") if options.replicated else ("adamw", "dmuon")
    devices, network = measured_rates(setting, model, options.batch, options.replicated)
    contenders = {name: setting.contender(name) for name in pair}
    plan = dmuon.plan(contenders[own].model).native
    num_tokens = options.batch * setting.config.sequence
    sum_s = host_sum_seconds(setting) if plan.mesh.num_replicates > 1 and not options.replicated else 0.0
    steps = {
        name: _plan.predict(plan, model, device, network, num_tokens, predicted_as, 1e3 * sum_s)
        for name, device, predicted_as in zip(pair, devices, ("AdamW", "dmuon"), strict=True)
    }
    summary = summarise(measure(contenders, options, setting.cluster), 1 + options.steps, base)
    with dmuon.profile(contenders[own].model) as profile:
        contenders[own].train(1 + options.rounds * options.steps)
    rows = {f"{LABELS[name]}, step": row_of(steps[name].step_ms, summary[name]["step_ms"], "ms") for name in pair}
    stats: dict[str, float] = summary[own]["mean_stats"]
    predicted, busy_ms = steps[own], steps[own].busy_ms
    rows["dmuon, update"] = row_of(busy_ms["update"], 1e3 * stats["busy_update_s"], "ms")
    rows["dmuon, hidden"] = row_of(100 * predicted.hidden, 100 * profile.hidden(), "%")
    device = devices[1]
    compute_s = 3 * model.forward_flops(num_tokens) / device.training_tflops / 1e12
    alone_s = compute_s + predicted.adamw_ms / 1e3
    rows["dmuon, absorbed"] = row_of(
        absorbed_percent(predicted.step_ms / 1e3, alone_s, sum(busy_ms[lane] for lane in WORK) / 1e3),
        absorbed_percent(summary[own]["step_ms"] / 1e3, alone_s, sum(stats[f"busy_{lane}_s"] for lane in WORK)),
        "%",
    )
    rows["dmuon, memory"] = row_of(statistics.fmean(plan.memory_bytes) / 1e6, stats["peak_bytes"] / 1e6, "MB")
    ratio = summary[own][f"ratio_to_{base}"]["median"]
    rows[f"{LABELS[own]} / {LABELS[base]}"] = row_of(predicted.step_ms / steps[base].step_ms, ratio, "x")
    rates = {
        "GFLOP/s a rank": 1e3 * device.training_tflops,
        "AdamW GB/s": device.elementwise_gb_per_s,
        "inside a node GB/s": device.link_gb_per_s,
        "for AdamW": devices[0].link_gb_per_s,
        "between nodes MB/s": 1e3 * network.gb_per_s,
        "latency between nodes us": network.latency_us,
        "FSDP2's sums in line ms": 1e3 * sum_s,
    }
    waits = {name: {"phases": step.phases_ms, **step.waits_ms} for name, step in steps.items()}
    return {"rates": rates, "rows": rows, "waits": waits, "optimizers": summary}


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(rounds=8)
    parser.add_argument("--replicated", action="store_true", help="in place of DistributedDataParallel, and beside it")
    options = parser.parse_args()
    setting, facts = prepare(options)
    found = compare(setting, options)
    if setting.cluster.rank == 0:
        print("\n".join(f"{key}: {value}" for key, value in facts.items()))
        print("rates: " + ", ".join(f"{name} {value:.3g}" for name, value in found["rates"].items()))
        print(f"{'':18}{'predicted':>11}{'measured':>11}{'error':>8}")
        for name, row in found["rows"].items():
            print(f"{name:18}{row['predicted']:11.2f}{row['measured']:11.2f}{row['error']:+8.0%} {row['unit']}")
        for name, waits in found["waits"].items():
            print(f"{LABELS[name]} waits, predicted ms: {waits}")
    conclude(options, setting.cluster, {**facts, **found})


if __name__ == "__main__":
    main()
