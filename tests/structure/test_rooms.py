"""The Python package's rooms lie in one order, and a module imports none that imports it; types included."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "dmuon"
# What each room may import besides itself.
USES = {
    "_setup": set(),
    "_planning": {"_setup"},
    "_simulating": {"_setup", "_planning"},
    "_saving": {"_setup"},
    "_running": {"_setup", "_planning", "_saving"},
    "_attention": {"_setup", "_saving", "_running"},
    "_inspecting": {"_setup", "_planning", "_saving", "_running"},
    "_doctor": {"_setup", "_planning"},  # its ranks train by the package's public functions
    "_paper": set(),
    "_command": {"_setup", "_planning", "_simulating", "_doctor", "_paper"},
}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


EXTENSIONS = {"dmuon._C", "dmuon._plan"}
SOURCES = {name_of(path): path.read_text() for path in PACKAGE.rglob("*.py")}


def imported(source: str) -> set[str]:
    """Modules of dmuon that a source names in an import anywhere: at its top, in a function, for types alone."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports say the whole path"
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= named
            if not named <= SOURCES.keys() | EXTENSIONS:  # else the package itself is asked for nothing
                found.add(str(node.module))
    return found & SOURCES.keys()


def room_of(module: str) -> str:
    return [*module.split("."), ""][1]


def backward(sources: dict[str, str]) -> list[tuple[str, str]]:
    return [
        (module, other)
        for module, source in sources.items()
        for other in imported(source)
        if room_of(module) in USES
        and room_of(other) in USES.keys() - {room_of(module)}
        and room_of(other) not in USES[room_of(module)]
    ]


def circle(sources: dict[str, str]) -> list[str]:
    graph = {module: imported(source) - {module} for module, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_room_is_known():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(USES)


def test_no_room_imports_one_above_it():
    assert backward(SOURCES) == []


def test_no_module_imports_one_that_imports_it():
    assert circle(SOURCES) == []


@pytest.mark.parametrize(
    "line",
    [
        "from dmuon._running.runtime import Runtime",
        "if TYPE_CHECKING:\n    from dmuon._running.runtime import Runtime",
        "def late():\n    import dmuon._running.runtime",
        "from dmuon._running import runtime",
    ],
)
def test_an_import_that_points_backward_or_round_is_found(line):
    changed = {**SOURCES, "dmuon._setup.dedication": SOURCES["dmuon._setup.dedication"] + "\n" + line + "\n"}
    assert ("dmuon._setup.dedication", "dmuon._running.runtime") in backward(changed)
    assert {"dmuon._setup.dedication", "dmuon._running.runtime"} <= set(circle(changed))
