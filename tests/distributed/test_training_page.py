"""docs/training.md: its blocks of Python run as they stand, one after the other, on 2 x 2 ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import dmuon

ROOT = Path(__file__).parents[2]


def blocks_of(page: str) -> list[tuple[int, str]]:
    """(line, source) of each block of Python."""
    found = re.finditer(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [(page.count("\n", 0, block.start()) + 1, block.group(1)) for block in found]


def run_blocks(mesh: Any, page: str, folder: str) -> int:
    before, classes = Path.cwd(), dict(dmuon.views.by_class)
    os.chdir(folder)
    try:
        names: dict[str, Any] = {"__name__": "training"}
        blocks = blocks_of(Path(page).read_text())
        for line, source in blocks:
            on_device = source.replace('"cpu"', f'"{mesh.device_type}"')
            # Lines of an error are the page's.
            exec(compile("\n" * line + on_device, page, "exec"), names)
        return len(blocks)
    finally:
        os.chdir(before)
        dmuon.views.by_class.clear()
        dmuon.views.by_class.update(classes)


def test_every_block_of_the_page_runs(ranks, tmp_path):
    page = ROOT / "docs" / "training.md"
    num_blocks = page.read_text().count("```python")
    assert ranks.run(run_blocks, (2, 2), page=str(page), folder=str(tmp_path)) == [num_blocks] * 4
