"""Runs all sections, each in a process of its own, and prints what they find."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Sequence

from dmuon._doctor.child import Child, events
from dmuon._doctor.findings import Findings, Section

# Each is a function and a module of one name; then a title, and the most seconds that it may take.
_SECTIONS = (
    ("versions", "Versions", 120),
    ("devices", "Devices", 120),
    ("network", "Network", 60),
    ("kernels", "Newton-Schulz: error against fp64", 240),
    ("ranks", "Ranks: three steps of a tiny model", 510),
    ("tuned", "Tuned shapes", 120),
)
_LINE = "-" * 20


def examine(write: Callable[[str], object]) -> list[Section]:
    """Runs the sections one by one. Writes each as soon as it has ended, and at last the hints and the whole report."""
    sections = []
    for name, title, limit_s in _SECTIONS:
        sections.append(_run(name, title, limit_s))
        write(_shown(sections[-1]))
    write(_hints(sections) + _verdict(sections) + _to_paste(sections))
    return sections


def as_json(sections: Sequence[Section]) -> str:
    return json.dumps({"sections": [dataclasses.asdict(one) for one in sections]}, indent=1) + "\n"


def _run(name: str, title: str, limit_s: float) -> Section:
    section = Section(title)
    for _, event in events([Child(limit_s, _call, name)]):
        section.take(event)
    return section


def _call(findings: Findings, name: str) -> None:
    # Here, because a module may fail to import: its PyTorch may be missing, or not the one that dmuon was built for.
    getattr(importlib.import_module(f"dmuon._doctor.{name}"), name)(findings)


def _shown(section: Section) -> str:
    width = max((len(name) for name, _ in section.facts), default=0)
    lines = [section.title, *(f"  {name:<{width}}  {value}" for name, value in section.facts)]
    return "\n".join([*lines, *(f"  FAILED: {why}" for why in section.failures), "", ""])


def _hints(sections: Sequence[Section]) -> str:
    hints = [hint for section in sections for hint in section.hints]
    return "\n".join(["Hints", *(f"  - {reason}\n    {command}" for reason, command in hints), "", ""]) if hints else ""


def _verdict(sections: Sequence[Section]) -> str:
    failed = [section.title for section in sections if section.failures]
    return f"FAILED: {'; '.join(failed)}\n\n" if failed else "All self-tests passed.\n\n"


def _to_paste(sections: Sequence[Section]) -> str:
    lines = [f"To paste into an issue, between the lines:\n{_LINE}"]
    for section in sections:
        lines.append(f"[{section.title}]")
        lines += [f"{name}: {value}" for name, value in section.facts]
        lines += [f"FAILED: {why}" for why in section.failures]
        lines += [f"hint: {reason}" for reason, _ in section.hints]
        lines += [text.rstrip() for text in section.details]
    return "\n".join([*lines, _LINE, ""])
