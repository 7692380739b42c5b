"""The answer of `simulate`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dmuon import _plan
from dmuon._command.answers import write_file
from dmuon._command.arguments import require_alone
from dmuon._command.paper import simulate_paper
from dmuon._command.task import read_model, read_task, title_of
from dmuon._planning import pictures
from dmuon._planning.owner_plan import DEFAULT_DEVICE
from dmuon._planning.task import require_size
from dmuon._simulating.pictures import draw_sweep
from dmuon._simulating.simulation import DEFAULT_TOKENS, MOST_DEVICES, Simulation, cluster_of, sweep_table

_PATIENCE_S = 2.0  # of somebody who sees nothing


def simulate(arguments: argparse.Namespace) -> str:
    """Returns the predicted step on one mesh, or on several, as a table or as JSON. Draws it if asked to."""
    if arguments.paper:
        require_alone(arguments, "--paper")
        return simulate_paper(arguments.json)
    _check(arguments)
    with _progress() as note:
        simulations = simulate_meshes(arguments, note)
    if arguments.plot is not None:
        if arguments.meshes:
            write_file(arguments.plot, lambda: draw_sweep(arguments.plot, simulations))
        else:
            write_file(arguments.plot, lambda: simulations[0].save_picture(arguments.plot))
    if arguments.trace is not None:
        write_file(arguments.trace, lambda: simulations[0].save_trace(arguments.trace))
    if arguments.json:
        figures = [simulation.to_dict() for simulation in simulations]
        return json.dumps(figures if arguments.meshes else figures[0]) + "\n"
    if not arguments.meshes:
        return f"{simulations[0]}\n"
    return f"{sweep_table(simulations)}\n"


def simulate_meshes(arguments: argparse.Namespace, note: Callable[[str], None]) -> list[Simulation]:
    """Returns the prediction on --mesh, or on each of --meshes. Gives `note` a text before each part of the work."""
    model = read_model(arguments)
    return [_simulate_on(arguments, model, mesh, note) for mesh in arguments.meshes or [arguments.mesh]]


def _check(arguments: argparse.Namespace) -> None:
    if (arguments.mesh is None) == (arguments.meshes is None):
        raise ValueError("simulate: expected --mesh or --meshes, one of them")
    for mesh in arguments.meshes or [arguments.mesh]:
        require_size(mesh, MOST_DEVICES, "--meshes" if arguments.meshes else "--mesh")
    if arguments.plot is not None:
        pictures.require_format(arguments.plot, "--plot")
    files = [os.path.realpath(file) for file in (arguments.plot, arguments.trace) if file is not None]
    if len(set(files)) < len(files):
        raise ValueError(f"--plot, --trace: expected two files, got {arguments.plot!r} for both")
    if arguments.trace is not None and arguments.meshes:
        raise ValueError("--trace: expected --mesh, since a trace is of one step; got --meshes")


def _simulate_on(
    arguments: argparse.Namespace, model: _plan.Model, mesh: tuple[int, int], note: Callable[[str], None]
) -> Simulation:
    here = argparse.Namespace(**vars(arguments) | {"mesh": mesh})
    name = f"{mesh[0]}x{mesh[1]}"
    note(f"planning {name}")
    plan = read_task(here, model).plan(here.strategy)
    note(f"predicting steps on {name}")
    tokens = here.tokens or model.sequence or DEFAULT_TOKENS
    cluster = cluster_of(here.device or DEFAULT_DEVICE, here.network, here.inter_bandwidth, mesh[1], tokens)
    return Simulation(title_of(model, mesh), model, plan, cluster)


class Note:
    """Says on stderr what is being done, once somebody has waited for a while."""

    def __init__(self) -> None:
        self._text = ""
        self._shows = False
        self._timer = threading.Timer(_PATIENCE_S, self._show)
        self._timer.daemon = True

    def __call__(self, text: str) -> None:
        self._text = text
        if self._shows:
            print(f"dmuon: {text} ...", file=sys.stderr, flush=True)

    def start(self) -> None:
        self._timer.start()

    def stop(self) -> None:
        self._timer.cancel()

    def _show(self) -> None:
        self._shows = True
        self(self._text)


@contextmanager
def _progress() -> Iterator[Note]:
    note = Note()
    note.start()
    try:
        yield note
    finally:
        note.stop()
