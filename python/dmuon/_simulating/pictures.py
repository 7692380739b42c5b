"""The picture of a model's predicted steps on several meshes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from dmuon._planning.pictures import new_figure
from dmuon._simulating.simulation import CONTENDERS, Simulation

COLORS = {"AdamW": "#7f7f7f", "dmuon": "#1f77b4", "Muon-AG": "#d62728"}


def draw_sweep(path: str | os.PathLike[str], simulations: Sequence[Simulation]) -> None:
    """Draws step and optimizer time of each contender by mesh.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = new_figure("simulate", figsize=(11.0, 4.2), dpi=150)
    steps, optimizers = figure.subplots(1, 2)
    plot_contenders(steps, simulations, lambda simulation, name: simulation.steps[name].step_ms)
    plot_contenders(optimizers, simulations, lambda simulation, name: simulation.steps[name].optimizer_ms)
    steps.set(xlabel="nodes x devices a node", ylabel="step, ms")
    optimizers.set(xlabel="nodes x devices a node", ylabel="for the optimizer, ms", yscale="log")
    steps.set_ylim(bottom=0)
    steps.legend(frameon=False, loc="lower right")
    figure.suptitle(simulations[0].heading(with_mesh=False), fontsize=10)
    figure.savefig(path)


def plot_contenders(
    axes: Any,
    simulations: Sequence[Simulation],
    value: Callable[[Simulation, str], float],
    contenders: Sequence[str] = CONTENDERS,
) -> None:
    """Draws one line a contender: `value(simulation, contender)` by mesh. Meshes are at 0, 1, 2 and so on."""
    places = range(len(simulations))
    for name in contenders:
        values = [value(simulation, name) for simulation in simulations]
        axes.plot(places, values, marker="o", markersize=4, color=COLORS[name], label=name)
    axes.set_xticks(places, [simulation.title.rpartition(" on ")[2] for simulation in simulations])
    axes.grid(alpha=0.3)
