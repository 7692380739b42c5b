"""The figures of the paper that dmuon predicts: layout, overlap, strategies, scaling and breakdown. Imports no torch.

`make paper` draws them, and those that are measured (paper.py).
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dmuon._command.arguments import parser
from dmuon._command.simulate import simulate_meshes
from dmuon._paper.ablation import Ablation, ablate
from dmuon._paper.owners import LOAD_BALANCE, RANK0, ROUND_ROBIN, XOR_LAYOUT
from dmuon._paper.table import ABLATION, ABLATION_GPUS, ABLATION_MODEL, ROWS, Row
from dmuon._paper.workload import WORKLOADS, Workload
from dmuon._planning.owner_plan import decide
from dmuon._planning.pictures import new_figure
from dmuon._simulating.pictures import COLORS, plot_contenders
from dmuon._simulating.simulation import Simulation

from dmuon import _plan

DEVICE = "a800-sxm4-80gb"  # the paper's
MESHES = ("1x8", "2x8", "4x8", "8x8", "16x8", "32x8")
SHOWN = ("qwen2.5-7b", "4x8")  # of the figures of one model on one mesh
# Some have nearly the same times: wide lines show behind narrow ones.
STRATEGIES: dict[str, dict[str, Any]] = {
    RANK0: {"color": "#7f7f7f", "linewidth": 4.0, "alpha": 0.5},
    ROUND_ROBIN: {"color": "#ff7f0e", "linewidth": 4.0, "alpha": 0.5},
    XOR_LAYOUT: {"color": "#8c564b", "linestyle": "--"},
    "lpt": {"color": "#2ca02c", "linewidth": 4.0, "alpha": 0.5},
    LOAD_BALANCE: {"color": COLORS["dmuon"]},
}
_PERCENTS = (-5, 0, 5, 10, 20, 50, 100, 200)
_LEAST_MS = 10.0  # of the breakdown's axis
Sweeps = dict[Workload, list[Simulation]]


def simulate(model: str, meshes: Sequence[str], tokens: int | None = None) -> list[Simulation]:
    """The predictions of `dmuon simulate` on the paper's device."""
    words = ["simulate", "--model", model, "--meshes", ",".join(meshes), "--device", DEVICE]
    given = [] if tokens is None else ["--tokens", str(tokens)]
    return simulate_meshes(parser().parse_args([*words, *given]), lambda _: None)


def rows_of(workload: Workload, meshes: Sequence[str]) -> dict[int, Row]:
    """The paper's rows, by the place of their number of GPUs among the meshes."""
    gpus = [nodes * devices for nodes, devices in (map(int, mesh.split("x")) for mesh in meshes)]
    return {gpus.index(row.gpus): row for row in ROWS if row.model == workload.name and row.gpus in gpus}


def sweep(workload: Workload, meshes: Sequence[str]) -> list[Simulation]:
    """Predictions with as many tokens as make AdamW's step on the first mesh the paper's: the paper states no batch."""
    tokens, step = 4096, rows_of(workload, meshes)[0].adamw_step
    for _ in range(4):
        (first,) = simulate(workload.catalogue_name, meshes[:1], tokens)
        tokens = round(tokens * step / first.steps["AdamW"].step_ms)
    return simulate(workload.catalogue_name, meshes, tokens)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_layout(path: Path, simulation: Simulation) -> None:
    """Draws the matrices of every slot, and the column and node of every unit's matrices, as dmuon's plan and the
    paper's formula have them."""
    plan = simulation.plan
    formula = decide(plan.inventory, plan.mesh, XOR_LAYOUT, plan.costs, plan.options)
    figure = new_figure("bench/paper.py", figsize=(13, 15))
    slots, ours, theirs = figure.subplots(3, 1, height_ratios=[2, 1, 1])
    _draw_slots(slots, plan)
    for axes, one, words in ((ours, plan, "dmuon's plan"), (theirs, formula, "the paper's formula (xor_layout)")):
        _draw_units(axes, one)
        axes.set_title(f"{words}: the slot of every unit's matrices (number: if a slot has several)", fontsize=10)
    figure.suptitle(f"{simulation.title}: owners by {plan.strategy}, {plan.costs.source}", fontsize=12)
    save(figure, path)


def _draw_slots(axes: Any, plan: _plan.Plan) -> None:
    """Draws a cell a slot. A cell lists the matrices that the slot owns."""
    patches, mesh = importlib.import_module("matplotlib.patches"), plan.mesh
    most = max(Counter(plan.owner).values())
    number_of = Counter(one.shape_text() for one in plan.inventory)
    colors = {shape: f"C{place % 10}" for place, shape in enumerate(number_of)}
    filled = Counter[int]()
    for one, owner in zip(plan.inventory, plan.owner, strict=True):
        left, line = mesh.shard_of(owner) + 0.04, filled[owner]
        top = mesh.replicate_of(owner) + 0.04 + 0.92 * line / most
        box = (left, top), 0.92, 0.92 / most
        axes.add_patch(patches.Rectangle(*box, facecolor=colors[one.shape_text()], alpha=0.35, edgecolor="white"))
        words = f"{one.unit} {one.name.split('.')[-2].removesuffix('_proj')}"
        axes.text(left + 0.46, top + 0.46 / most, words, ha="center", va="center", fontsize=min(8.0, 78 / most))
        filled[owner] += 1
    for owner in range(mesh.num_owners()):
        corner = mesh.shard_of(owner), mesh.replicate_of(owner)
        axes.add_patch(patches.Rectangle(corner, 1, 1, fill=False, edgecolor="#888888"))
    axes.set(xlim=(0, mesh.num_shards), ylim=(mesh.num_replicates, 0))
    axes.set_xticks([x + 0.5 for x in range(mesh.num_shards)], [f"column {x}" for x in range(mesh.num_shards)])
    axes.set_yticks([y + 0.5 for y in range(mesh.num_replicates)], [f"node {y}" for y in range(mesh.num_replicates)])
    axes.tick_params(length=0)
    axes.set_title("dmuon's plan: the matrices of every slot (unit, name)", fontsize=10)
    shades = {f"{shape} ({number_of[shape]})": {"facecolor": color, "alpha": 0.35} for shape, color in colors.items()}
    _legend_beside(axes, shades)


def _draw_units(axes: Any, plan: _plan.Plan) -> None:
    """Draws a row a slot, column by column, and a box where the slot owns matrices of a unit."""
    mesh, nodes = plan.mesh, range(plan.mesh.num_replicates)
    place = {unit: index for index, unit in enumerate(dict.fromkeys(one.unit for one in plan.inventory))}
    counts = Counter((owner, place[one.unit]) for one, owner in zip(plan.inventory, plan.owner, strict=True))
    for (owner, unit), number in counts.items():
        node = mesh.replicate_of(owner)
        row = mesh.shard_of(owner) * len(nodes) + node
        axes.barh(row, 0.9, left=unit - 0.45, height=0.9, color=f"C{node % 10}")
        if number > 1:
            axes.text(unit, row, str(number), ha="center", va="center", fontsize=7, color="white")
    for column in range(1, mesh.num_shards):
        axes.axhline(column * len(nodes) - 0.5, color="#bbbbbb", linewidth=0.8)
    axes.set(xlim=(-0.6, len(place) - 0.4), ylim=(mesh.num_owners() - 0.4, -0.6), xlabel="unit, in execution order")
    middles = [column * len(nodes) + (len(nodes) - 1) / 2 for column in range(mesh.num_shards)]
    axes.set_yticks(middles, [f"column {column}" for column in range(mesh.num_shards)])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend_beside(axes, {f"node {node}": {"facecolor": f"C{node % 10}"} for node in nodes})


def _legend_beside(axes: Any, styles: dict[str, dict[str, Any]]) -> None:
    """Adds a legend of coloured boxes on the right of the panel."""
    patches = importlib.import_module("matplotlib.patches")
    handles = [patches.Patch(label=label, **style) for label, style in styles.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)


def _log_scale(axes: Any) -> None:
    """Makes the vertical axis logarithmic, with plain numbers at 1, 2 and 5."""
    axes.set_yscale("log")
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def draw_strategies(path: Path, sweeps: Sweeps) -> None:
    """Draws the slowest owner's time by strategy beside Muon-AG's optimizer, and the same over the plan's bound."""
    figure = new_figure("bench/paper.py", figsize=(3.6 * len(sweeps) + 1, 7.5))
    panels = figure.subplots(2, len(sweeps), squeeze=False)
    for (above, below), (workload, simulations) in zip(panels.T, sweeps.items(), strict=True):
        plans = [simulation.plan for simulation in simulations]
        bounds = [plan.bound_ns / 1e6 for plan in plans]
        for strategy, style in STRATEGIES.items():
            made = [decide(plan.inventory, plan.mesh, strategy, plan.costs, plan.options) for plan in plans]
            times = [plan.makespan_ns / 1e6 for plan in made]
            above.plot(range(len(plans)), times, label=f"dmuon, {strategy}", **style)
            if strategy != RANK0:
                ratios = [time / bound for time, bound in zip(times, bounds, strict=True)]
                below.plot(range(len(plans)), ratios, **style)
        above.plot(range(len(plans)), bounds, color="black", linestyle=":", label="bound of any owners")
        plot_contenders(above, simulations, lambda one, name: one.steps[name].optimizer_ms, ["Muon-AG"])
        above.set_title(_title(workload))
        _log_scale(above)
        below.set(ylim=(0.95, None), xlabel="nodes x GPUs a node")
        below.set_xticks(above.get_xticks(), above.get_xticklabels())
        below.grid(alpha=0.3)
    panels[0][0].set_ylabel("slowest owner's update, ms")
    panels[1][0].set_ylabel("slowest owner's update over the bound")
    _legend(figure, panels[0][0])
    device = next(iter(sweeps.values()))[0].cluster.device.description
    figure.suptitle(f"Optimizer time by the strategy that chooses owners, {device}, predicted", fontsize=12)
    save(figure, path)


def draw_scaling(path: Path, sweeps: Sweeps) -> None:
    """Draws step, overhead and optimizer time of AdamW, dmuon and Muon-AG by mesh, with the paper's rows as crosses."""
    figure = new_figure("bench/paper.py", figsize=(3.6 * len(sweeps) + 1, 10.5))
    panels = figure.subplots(3, len(sweeps), squeeze=False)
    for (steps, overheads, optimizers), (workload, simulations) in zip(panels.T, sweeps.items(), strict=True):
        plot_contenders(steps, simulations, lambda one, name: one.steps[name].step_ms)
        plot_contenders(overheads, simulations, lambda one, name: 100 * (one.ratio(name) - 1), ("dmuon", "Muon-AG"))
        plot_contenders(optimizers, simulations, lambda one, name: one.steps[name].optimizer_ms)
        updates = [simulation.steps["dmuon"].update_ms for simulation in simulations]
        label = "dmuon, slowest owner's update"
        optimizers.plot(range(len(updates)), updates, "--", color=COLORS["dmuon"], label=label)
        optimizers.plot([], [], "kx", markersize=8, markeredgewidth=2, label="measured by the paper")
        meshes = [label.get_text() for label in optimizers.get_xticklabels()]
        for place, row in rows_of(workload, meshes).items():
            for name, step in (("AdamW", row.adamw_step), ("dmuon", row.dmuon_step), ("Muon-AG", row.vanilla_step)):
                _cross(steps, place, step, name)
                if name != "AdamW":
                    _cross(overheads, place, 100 * (step / row.adamw_step - 1), name)
            _cross(optimizers, place, row.dmuon_optim, "dmuon")
            _cross(optimizers, place, row.vanilla_optim, "Muon-AG")
        steps.set(title=f"{_title(workload)}, {simulations[0].cluster.tokens} tokens", ylim=(0, None))
        overheads.axhline(0, color="black", linewidth=0.8)
        overheads.set_yscale("symlog", linthresh=10, linscale=1.5)
        overheads.set_ylim(-5, 400)
        overheads.set_yticks(_PERCENTS, map(str, _PERCENTS))
        optimizers.set_xlabel("nodes x GPUs a node")
        _log_scale(optimizers)
    words = ("step, ms", "step above AdamW's, %", "optimizer's part of the step, ms")
    for axes, label in zip(panels[:, 0], words, strict=True):
        axes.set_ylabel(label)
    _legend(figure, panels[2][0])
    device = next(iter(sweeps.values()))[0].cluster.device.description
    tokens = "Tokens of a device and step are chosen so that AdamW's step on the first mesh is the paper's"
    figure.suptitle(f"Training steps on {device}, predicted. {tokens}", fontsize=12)
    save(figure, path)


def _cross(axes: Any, place: int, value: float, contender: str) -> None:
    axes.plot(place, value, "x", color=COLORS[contender], markersize=8, markeredgewidth=2)


def _title(workload: Workload) -> str:
    return f"{workload.name}{' (stand-in)' if workload.is_stand_in else ''}"


def _legend(figure: Any, axes: Any) -> None:
    """Adds one legend below all panels, with the lines of one of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


def draw_breakdown(path: Path) -> None:
    """Draws the paper's shares of DMuon's gain beside those of the profile of its engine, and the times behind them."""
    found = ablate()
    figure = new_figure("bench/paper.py", figsize=(14, 4.8))
    shares, times = figure.subplots(1, 2, width_ratios=[1, 1.1])
    _draw_shares(shares, found)
    _draw_changes(times, found)
    figure.suptitle(
        f"DMuon's gain over Muon-AG, {ABLATION_MODEL} on {ABLATION_GPUS} A800: the paper's shares (measured) and the "
        "profile of its engine (predicted)",
        fontsize=12,
    )
    save(figure, path)


def _draw_shares(axes: Any, found: Ablation) -> None:
    three = [one for one in found.without if one.share_of_three is not None]
    by_component = {one.component: one for one in found.path}
    readings = {
        "paper": list(ABLATION.values()),
        "predicted: DMuon without it, of the three": [one.share_of_three or 0.0 for one in three],
        "predicted: DMuon without it, of the whole gain": [one.share or 0.0 for one in three],
        "predicted: added to Muon-AG, step by step": [by_component[name].share or 0.0 for name in ABLATION],
    }
    colors = ("#444444", "#1f77b4", "#9ecae1", "#d62728")
    for line, ((label, values), color) in enumerate(zip(readings.items(), colors, strict=True)):
        bars = axes.barh([place + 0.2 * line for place in range(3)], values, 0.19, color=color, label=label)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.set_yticks([place + 0.3 for place in range(3)], [name.replace(" and ", "\nand ") for name in ABLATION])
    axes.invert_yaxis()
    axes.set(xlabel="share of the gain in optimizer time, %", xlim=(0, 100))
    axes.legend(loc="upper center", bbox_to_anchor=(0.35, -0.13), ncols=2, frameon=False, fontsize=8)


def _draw_changes(axes: Any, found: Ablation) -> None:
    """Draws the optimizer time after each change, and says for which the profile has none."""
    colors = dict(zip(ABLATION, ("#9467bd", "#2ca02c", "#ff7f0e"), strict=True))
    bars: list[tuple[str, float | None, str]] = [("Muon-AG", found.vanilla_ms, COLORS["Muon-AG"])]
    bars += [(one.words, one.optim_ms, colors[one.component]) for one in found.path]
    bars += [("DMuon", found.dmuon_ms, COLORS["dmuon"])]
    bars += [(f"DMuon, {one.words}", one.optim_ms, colors[one.component]) for one in found.without]
    words, times, shades = zip(*bars, strict=True)
    labels = [f"{time:.1f}" if time else "the profile cannot say" for time in times]
    drawn = axes.barh(range(len(bars)), [time or _LEAST_MS for time in times], color=shades)
    axes.bar_label(drawn, labels, padding=3, fontsize=8)
    axes.set_yticks(range(len(bars)), words, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="optimizer, ms, predicted", xscale="log", xlim=(_LEAST_MS, 5000))


def draw_predicted(
    out: Path, models: Sequence[str] = tuple(WORKLOADS), meshes: Sequence[str] = MESHES, shown: tuple[str, str] = SHOWN
) -> list[Path]:
    """Draws all figures of this module into `out` and returns their files."""
    out.mkdir(parents=True, exist_ok=True)
    (one,) = simulate(shown[0], [shown[1]])
    sweeps = {WORKLOADS[name]: sweep(WORKLOADS[name], meshes) for name in models}
    names = ("layout", "overlap", "strategies", "scaling", "breakdown")
    layout, overlap, strategies, scaling, breakdown = files = [out / f"{name}.svg" for name in names]
    draw_layout(layout, one)
    one.save_picture(overlap)
    draw_strategies(strategies, sweeps)
    draw_scaling(scaling, sweeps)
    draw_breakdown(breakdown)
    return files
