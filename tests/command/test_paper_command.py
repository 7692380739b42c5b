"""The answer of `dmuon simulate --paper`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from dmuon._command.paper import simulate_paper
from dmuon._paper.table import ROWS


@pytest.fixture(scope="module")
def text():
    return simulate_paper(as_json=False)


def test_all_rows_are_shown_with_their_figures(text):
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    for row in ROWS:
        line = next(line for line in lines if line.startswith(f"{row.model:<12}{row.gpus:4d}"))
        for value in row[2:6]:
            assert f"/{value:.0f} " in line
        assert f" {row.adamw_step:.0f} " in line
    assert "Qwen2.5-7B   256  21/22 -4.5 f     2862/2850 +0.4 f" in text
    assert "Qwen2.5-7B   128  27/32 -15.7 f    2756/2744 +0.4 f  3536/3554 -0.5 h" in text


def test_the_text_says_what_is_fitted(text):
    for words in (
        "fitted to the same 18 rows that are then counted",
        "The 12 rows between\n  are held out",
        '"DMuon step = AdamW step", no profile, all models',
        "Wall-WM's sizes are not public",
        "cannot say",
    ):
        assert words in text


def test_json_has_the_same_without_torch_and_numpy(text):
    program = (
        "import sys\nfrom dmuon._command.paper import simulate_paper\nprint(simulate_paper(True), end='')\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert [(one["model"], one["gpus"]) for one in found["rows"]] == [row[:2] for row in ROWS]
    for one, row in zip(found["rows"], ROWS, strict=True):
        figure = one["dmuon_optim"]
        assert figure["table"] == row.dmuon_optim
        assert f"{figure['predicted']:.0f}/{figure['table']:.0f} {figure['error']:+.1f}" in text
        assert one["adamw_step"] == {"predicted": None, "table": row.adamw_step, "error": None, "basis": "given"}
    assert found["summary"]["counts"]["dmuon_optim"]["within"] >= 16
    assert {one["basis"] for one in found["constants"].values()} == {"measured", "fitted"}
    assert len(found["owners"]) == len(ROWS)
