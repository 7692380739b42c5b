"""A save that is killed, or a file that is cut off, costs at most the newest checkpoint (docs/checkpoints.md)."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
from checkpoints import dicts_of, full_state, group_of, started, train, unlike
from models import make_gpt
from page_blocks import blocks_of
from pool import RankPool

NUM_KILLS = int(os.environ.get("DMUON_NUM_KILLS", "3"))
SEED = 11


def page_functions() -> dict[str, Any]:
    """The functions that the page defines for saving and resuming."""
    names: dict[str, Any] = {"Path": Path, "dcp": dcp}
    blocks = blocks_of("docs/checkpoints.md", "python")
    source = next(block.source for block in blocks if "def is_whole" in block.source)
    exec(source[: source.index("def resume")], names)
    return names


def save_for_ever(mesh: Any, directory: str) -> None:
    model, opt = started(mesh, make_gpt(depth=2))
    for step in range(1, 10_000):
        train(mesh, model, opt, range(step - 1, step))
        dcp.save(dicts_of(model, opt), checkpoint_id=Path(directory) / f"step-{step}", **group_of(mesh))


def whole_steps(directory: Path) -> list[int]:
    is_whole = page_functions()["is_whole"]
    return sorted(int(path.name.removeprefix("step-")) for path in directory.glob("step-*") if is_whole(path))


def loads(mesh: Any, directory: str, step: int) -> list[str]:
    """What of a checkpoint is not as after so many steps."""
    expected = started(mesh, make_gpt(depth=2))
    train(mesh, *expected, range(step))
    model, opt = started(mesh, make_gpt(seed=7, depth=2))
    saved = dicts_of(model, opt)
    dcp.load(saved, checkpoint_id=Path(directory) / f"step-{step}", **group_of(mesh))
    model.load_state_dict(saved["model"])
    dsd.set_optimizer_state_dict(model, opt, saved["optimizer"])
    return unlike(full_state(model, opt), full_state(*expected))


@pytest.mark.parametrize("kill", range(NUM_KILLS))
def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(ranks, kill, tmp_path):
    saving = RankPool(2)
    saving.begin(save_for_ever, (2,), directory=str(tmp_path))
    deadline = time.monotonic() + 300
    while not (tmp_path / "step-2" / ".metadata").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.Random(SEED + kill).uniform(0, 0.5))
    saving.close()  # SIGKILL
    begun = max(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
    newest = whole_steps(tmp_path)[-1]
    assert newest in (begun, begun - 1)
    assert ranks.run(loads, (2,), directory=str(tmp_path), step=newest) == [[]] * 2


def save_two(mesh: Any, directory: str) -> None:
    model, opt = started(mesh, make_gpt(depth=2))
    for step in (1, 2):
        train(mesh, model, opt, range(step - 1, step))
        dcp.save(dicts_of(model, opt), checkpoint_id=Path(directory) / f"step-{step}", **group_of(mesh))


def load_cut_off(mesh: Any, directory: str) -> tuple[str, list[str]]:
    """(the error, which matrices have changed nevertheless)."""
    model, opt = started(mesh, make_gpt(seed=7, depth=2))
    before = full_state(model, opt)
    saved = dicts_of(model, opt)
    message = ""
    try:
        dcp.load(saved, checkpoint_id=Path(directory) / "step-2", **group_of(mesh))
    except dcp.api.CheckpointException as error:
        message = str(error)
    changed = unlike(full_state(model, opt), before)
    return message, [name for name in changed if "blocks" in name and "weight" in name and "norm" not in name]


def test_a_file_that_was_cut_off_is_seen_and_costs_no_matrix(ranks, tmp_path):
    ranks.run(save_two, (2, 2), directory=str(tmp_path))
    assert whole_steps(tmp_path) == [1, 2]
    largest = max((tmp_path / "step-2").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    assert whole_steps(tmp_path) == [1]
    for message, changed in ranks.run(load_cut_off, (2, 2), directory=str(tmp_path)):
        assert message
        assert changed == []
