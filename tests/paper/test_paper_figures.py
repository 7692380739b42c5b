"""The figures of `make paper` that are predicted, on few meshes."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from dmuon._paper.table import PI0, row_of
from dmuon._paper.workload import WORKLOADS

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench import paper_figures
from bench.contender import StepTimes
from bench.report import Record

MESHES = ("1x8", "2x8")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return paper_figures.draw_predicted(tmp_path_factory.mktemp("paper"), [PI0], MESHES, ("pi0", "2x4"))


def test_all_figures_are_written_and_well_formed(files):
    assert [path.name for path in files] == [
        f"{name}.svg" for name in ("layout", "overlap", "strategies", "scaling", "breakdown")
    ]
    for path in files:
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_first_step_of_adamw_is_the_papers():
    first, second = paper_figures.sweep(WORKLOADS[PI0], MESHES)
    assert first.steps["AdamW"].step_ms == pytest.approx(row_of(PI0, 8).adamw_step, rel=1e-3)
    assert first.cluster.tokens == second.cluster.tokens


def test_the_papers_rows_stand_at_their_mesh():
    rows = paper_figures.rows_of(WORKLOADS[PI0], ["1x4", "2x8", "32x8"])
    assert {place: row.gpus for place, row in rows.items()} == {1: 16, 2: 256}


def test_training_time_includes_each_blocks_first_step():
    block = [StepTimes(forward=1.0, backward=2.0, optimizer=seconds, host=0.0) for seconds in (1.0, 3.0)]
    assert Record("dmuon", blocks=[block, block[:1]]).seconds() == [3 * 5.0, 3 * 5.0 + 2 * 4.0]
