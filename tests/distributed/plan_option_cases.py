"""Programs with options of planning; run on the ranks of a pool."""

from __future__ import annotations

from typing import Any

from plan_cases import started

import dmuon


def error_of_plan(mesh: Any, given: dict[str, Any]) -> str:
    """What `dmuon.plan` says to options for a model with Muon; without, it gives its plan."""
    model, opt = started(mesh)
    assert dmuon.plan(model) is opt.plan
    try:
        dmuon.plan(model, **given)
    except ValueError as raised:
        return str(raised)
    return ""


def error_where_one_differs(mesh: Any, here: dict[str, Any], **options: Any) -> str:
    """Slot 1 has options of its own."""
    try:
        started(mesh, **options | (here if mesh.get_rank() == 1 else {}))
    except ValueError as raised:
        return str(raised)
    return ""
