"""Writes the answer on the paper's table as text."""

from __future__ import annotations

import dataclasses
import textwrap

from dmuon._paper.ablation import Ablation, Change
from dmuon._paper.answer import NOTES, Answer, close_by_strategy
from dmuon._paper.owners import STRATEGIES, Owners
from dmuon._paper.prediction import FITTED, Figure, Prediction
from dmuon._paper.profile import ORIGINS, PAPER
from dmuon._paper.summary import Summary
from dmuon._paper.table import ABLATION, ABLATION_GPUS, ABLATION_MODEL, SOURCE, misprints
from dmuon._paper.workload import WORKLOADS

_WIDTH = 120


def text(found: Answer) -> str:
    """Returns all sections, at most 120 characters wide."""
    sections = [
        _rows(found.rows),
        _summary(found.summary, found.errors),
        ["What is fitted on what:", *(line for note in NOTES for line in _wrapped(f"- {note}"))],
        _ablation(found.ablation),
        _owners(found.owners),
        _constants(),
        ["Printed quotients that the table's own times do not give:", *(f"  {one}" for one in misprints())],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(words, _WIDTH, subsequent_indent="  ")


def _rows(rows: list[Prediction]) -> list[str]:
    lines = [
        f"Table tab:scaling of {SOURCE}.",
        "ms: predicted/table error %; f: a constant was fitted to this row, h: the row was held out.",
        f"{'model':<12}{'GPUs':>4}  {'DMuon optim':<17}{'step':<18}{'Muon-AG optim':<18}{'step':<18}"
        f"{'AdamW':>6}  overhead %",
    ]
    for one in rows:
        lines.append(
            f"{one.row.model:<12}{one.row.gpus:4d}  {_figure(one.dmuon_optim):<17}{_figure(one.dmuon_step):<18}"
            f"{_figure(one.vanilla_optim):<18}{_figure(one.vanilla_step):<18}{one.row.adamw_step:6.0f}  "
            f"{one.overhead:.1f}/{one.row.overhead:.1f}"
        )
    return lines


def _figure(figure: Figure) -> str:
    basis = "f" if figure.basis == FITTED else "h"
    return f"{figure.predicted:.0f}/{figure.table:.0f} {figure.error:+.1f} {basis}"


def _summary(summary: Summary, errors: dict[str, dict[str, float]]) -> list[str]:
    lines = [f"{'figures':<70}{'within':>8}{'rows':>10}   worst"]
    for one in summary.counts.values():
        rows = f"{one.within} of {one.of}"
        lines.append(f"{one.words:<70}{one.limit:6.0f} %{rows:>10}   {one.worst:+.1f} % ({one.worst_row})")
    lines += ["", f"{'all 24 rows':<70}{'table':>8}{'predicted':>12}"]
    lines += [f"{one.words:<70}{one.table:8.2f}{one.predicted:12.2f}" for one in summary.means.values()]
    for which, by in errors.items():
        words = ", ".join(f"{name} {value:.2f}" for name, value in by.items())
        lines.append(f"mean error of the overhead in points, {which} rows, by: {words}")
    return lines


def _ablation(ablation: Ablation) -> list[str]:
    lines = [
        f"Breakdown (tab:ablation): {ABLATION_MODEL} on {ABLATION_GPUS} GPUs. Predicted optimizer: Muon-AG "
        f"{ablation.vanilla_ms:.0f} ms, DMuon {ablation.dmuon_ms:.1f} ms.",
        f"{'component':<37}{'paper':>6}  {'DMuon without it':<52}{'ms':>6}{'% of all':>9}{'of 3':>6}",
        *(_change(one) for one in ablation.without),
        f"{'component':<37}{'paper':>6}  {'step by step':<52}{'ms':>6}{'% of all':>9}",
        *(_change(one) for one in ablation.path),
    ]
    return lines + _wrapped(
        "% of all: of the way from Muon-AG to DMuon; of 3: of the sum of the first three differences, a reading chosen "
        "because it comes nearest. No reading gives the paper's shares, which add up to 96. The profile has no cost "
        "of untuned kernels."
    )


def _change(one: Change) -> str:
    if one.optim_ms is None or one.share is None:
        return f"{one.component:<37}{ABLATION[one.component]:6.0f}  {one.words:<52}{'cannot say':>15}"
    of_three = "" if one.share_of_three is None else f"{one.share_of_three:6.0f}"
    figures = f"{one.optim_ms:6.0f}{one.share:9.1f}{of_three}"
    return f"{one.component:<37}{ABLATION[one.component]:6.0f}  {one.words:<52}{figures}"


def _owners(owners: list[Owners]) -> list[str]:
    lines = [
        "Owners: DMuon's optimizer ms by strategy, at the profile's times. load_balance is dmuon's default.",
        f"{'model':<12}{'GPUs':>4}{'table':>8}" + "".join(f"{name:>14}" for name in STRATEGIES) + f"{'bound':>10}",
    ]
    for one in owners:
        times = "".join(f"{one.optim_ms[name]:14.1f}" for name in STRATEGIES)
        lines.append(f"{one.row.model:<12}{one.row.gpus:4d}{one.row.dmuon_optim:8.0f}{times}{one.bound_ms:10.1f}")
    close = close_by_strategy(owners)
    lines.append(f"{'public rows within 15 %':<24}" + "".join(f"{close[name]:14d}" for name in STRATEGIES))
    return lines + _wrapped(
        "The constants are fitted with `dealt`, so this count favours it. xor_layout numbers the owners of round_robin "
        "differently, so its sums are the same. No owners are faster than the bound."
    )


def _constants() -> list[str]:
    lines = ["Constants"]
    values = dataclasses.asdict(PAPER)
    for basis, source in dict.fromkeys(origin[1:] for origin in ORIGINS.values()):
        lines += _wrapped(f"- {basis}: {source}")
        lines += [
            f"    {name:<20}{values[name]:>9.4g} {origin.unit}"
            for name, origin in ORIGINS.items()
            if origin[1:] == (basis, source)
        ]
    lines += ["", f"{'model':<12}{'matrices':>9}{'10^9 elements':>15}{'10^9 parameters':>17}{'tensors':>9}  origin"]
    for one in WORKLOADS.values():
        shapes = one.shapes()
        elements = sum(shape.millions for shape in shapes) / 1e3
        lines.append(
            f"{one.name:<12}{len(shapes):>9}{elements:>15.2f}{one.billions:>17.1f}{one.tensors:>9}  {one.origin}"
        )
    return lines
