"""The findings of a section: facts, failures, and hints. The section's process sends them one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

Event = tuple[str, tuple[str, ...]]


@dataclasses.dataclass
class Section:
    """The part of the report about one section."""

    title: str
    facts: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    hints: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # a reason, and what to do
    details: list[str] = dataclasses.field(default_factory=list)  # output of a process that failed

    def take(self, event: Event) -> None:
        kind, values = event
        held: list[Any] = getattr(self, kind)
        held.append(values if len(values) > 1 else values[0])


class Findings:
    """A section fills this. A crash later does not lose what was found before.

    findings.fact("driver", "580.65")
    findings.check("cpu fp32", error <= bound, f"error {error:.1e}")
    """

    def __init__(self, send: Callable[[Event], object]) -> None:
        self.send = send

    def fact(self, name: str, value: object) -> None:
        self.send(("facts", (name, str(value))))

    def check(self, name: str, holds: bool, found: str) -> None:
        """Adds a fact that ends with ok or FAILED. The latter fails the section."""
        self.fact(name, f"{found}: {'ok' if holds else 'FAILED'}")
        if not holds:
            self.fail(f"{name}: {found}")

    def fail(self, why: str) -> None:
        self.send(("failures", (why,)))

    def hint(self, reason: str, command: str) -> None:
        self.send(("hints", (reason, command)))

    def detail(self, text: str) -> None:
        self.send(("details", (text,)))
