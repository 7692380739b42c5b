"""The answer of `dmuon simulate --paper`: the paper's table beside the predictions of a profile of its engine."""

from __future__ import annotations

import json

from dmuon._paper.answer import answer
from dmuon._paper.answer import as_json as plain
from dmuon._paper.text import text


def simulate_paper(as_json: bool) -> str:
    """Returns the paper's 24 rows with predictions, errors, summary, breakdown and owners."""
    found = answer()
    return json.dumps(plain(found)) + "\n" if as_json else text(found)
