"""The picture of a model's predicted steps on several meshes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dmuon._planning.pictures import new_figure
from dmuon._simulating.simulation import CONTENDERS, Simulation

_COLORS = {"AdamW": "#7f7f7f", "dmuon": "#1f77b4", "Muon-AG": "#d62728"}


def draw_sweep(path: str | os.PathLike[str], simulations: Sequence[Simulation]) -> None:
    """Draws step and optimizer time of each contender by mesh.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = new_figure("simulate", figsize=(11.0, 4.2), dpi=150)
    steps, optimizers = figure.subplots(1, 2)
    places = range(len(simulations))
    names = [simulation.title.rpartition(" on ")[2] for simulation in simulations]
    for contender in CONTENDERS:
        predictions = [simulation.steps[contender] for simulation in simulations]
        style = {"marker": "o", "color": _COLORS[contender], "label": contender}
        steps.plot(places, [prediction.step_ms for prediction in predictions], **style)
        optimizers.plot(places, [prediction.optimizer_ms for prediction in predictions], **style)
    for axes, words in ((steps, "step, ms"), (optimizers, "for the optimizer, ms")):
        axes.set_xticks(places, names)
        axes.set_xlabel("nodes x devices a node")
        axes.set_ylabel(words)
        axes.grid(alpha=0.3)
    steps.set_ylim(bottom=0)
    optimizers.set_yscale("log")
    steps.legend(frameon=False, loc="lower right")
    figure.suptitle(f"{simulations[0].title.rpartition(' on ')[0]}, predicted", fontsize=10)
    figure.savefig(path)
