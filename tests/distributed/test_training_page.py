"""The blocks of Python on the pages about training run as they stand, one after the other, on 2 x 2 ranks.

README's blocks follow. Each runs after lines that stand for the reader's program.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

from page_blocks import README, ROOT, TOGETHER, blocks_of

import dmuon

# By the beginning of a block: the lines that a reader's program has before it.
READERS_PROGRAM = {
    "import torch.distributed.checkpoint as dcp": "model, optimizer = build(mesh)",
    "for index, micro_batch": """
        import contextlib

        def loss_of(model, tokens):
            return nn.functional.cross_entropy(model(tokens), tokens)

        micro_batches = [torch.randint(0, 100, (64,)) for _ in range(2)]
    """,
    "small = [p for p": """
        model = nn.Sequential(nn.Embedding(100, 32), Block(32), nn.Linear(32, 100))
        dmuon.dedicate_params(model, mesh)
        fully_shard(model, mesh=mesh)
    """,
}


class Logged:
    """Stands for a run of wandb, whose own client starts a process."""

    def log(self, data: dict[str, float], step: int) -> None:
        assert step >= 0 and data and all(math.isfinite(value) for value in data.values()), data


def stand_in_for_wandb() -> types.ModuleType:
    wandb: Any = types.ModuleType("wandb")
    wandb.init = lambda project, mode: Logged()
    return wandb


def run_block(page: str, line: int, source: str, device: str, names: dict[str, Any]) -> None:
    on_device = source.replace('"cpu"', f'"{device}"')
    if "import wandb" in source:  # Transformers, on another page, would look for more of it
        sys.modules["wandb"] = stand_in_for_wandb()
    # Lines of an error are the page's.
    exec(compile("\n" * line + on_device, str(ROOT / page), "exec"), names)
    sys.modules.pop("wandb", None)


def run_blocks(mesh: Any, folder: str) -> int:
    """Returns how many blocks have run."""
    before, classes, attention = Path.cwd(), dict(dmuon.views.by_class), dict(dmuon.attention.by_class)
    os.chdir(folder)
    try:
        names: dict[str, Any] = {"__name__": "training"}
        blocks = [(page, block) for page in TOGETHER for block in blocks_of(page, "python")]
        for page, block in blocks:
            run_block(page, block.line, block.source, mesh.device_type, names)
        names["mesh"] = mesh
        for block in (rest := blocks_of(README, "python")[1:]):
            (before_it,) = [text for start, text in READERS_PROGRAM.items() if block.source.startswith(start)]
            run_block(README, 0, inspect.cleandoc(before_it), mesh.device_type, names)
            run_block(README, block.line, block.source, mesh.device_type, names)
        return len(blocks) + len(rest)
    finally:
        os.chdir(before)
        dmuon.views.by_class.clear()
        dmuon.views.by_class.update(classes)
        dmuon.attention.by_class.clear()
        dmuon.attention.by_class.update(attention)


def test_every_block_of_the_pages_runs(ranks, tmp_path):
    num_blocks = sum((ROOT / page).read_text().count("```python") for page in (*TOGETHER, README))
    assert ranks.run(run_blocks, (2, 2), folder=str(tmp_path)) == [num_blocks - 1] * 4  # all but README's program
