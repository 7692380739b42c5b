"""timm's own parts in the order of its train.py: task, schedule, the first rank's saver, resuming from its file."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from timm_alone import import_timm
from training import place_of, weights_of

import dmuon

EPOCHS, BATCHES = 3, 2


def task_of() -> Any:
    model = import_timm().create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3, num_classes=4
    )
    return importlib.import_module("timm.task").ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(2, 3, 32, 32, generator=generator), torch.randint(0, 4, (2,), generator=generator)


def trained(mesh: Any, folder: str, resumed: bool) -> dict[str, torch.Tensor]:
    """The lines with dmuon are those of docs/trainers.md; train.py has the others."""
    rank, _ = place_of(mesh)
    torch.manual_seed(rank)  # as timm does
    task = task_of()
    model = task.get_trainable_module()
    dmuon.dedicate_params(model, mesh, sync_from_rank0=True, costs="modelled")
    optimizer = dmuon.Muon(model, lr=0.02, weight_decay=0.05, ns_dtype=torch.float32)

    start = 0
    if resumed:
        path = str(Path(folder) / "checkpoint-1.pth.tar")
        start = importlib.import_module("timm.task").resume_task_checkpoint(task, path, optimizer, log_info=False)
    saver = None
    if rank == 0 and not resumed:
        saver = importlib.import_module("timm.utils").CheckpointSaver(
            model=model, optimizer=optimizer, checkpoint_dir=folder, recovery_dir=folder, task=task
        )
    schedule, _ = importlib.import_module("timm.scheduler").create_scheduler_v2(optimizer, num_epochs=EPOCHS)
    schedule.step(start)
    for epoch in range(start, EPOCHS):
        for number in range(BATCHES):
            task(*batch(BATCHES * epoch + number, rank))["loss"].backward()
            dmuon.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with dmuon.whole_states(model, optimizer):
            if saver is not None:
                saver.save_checkpoint(epoch, metric=epoch)
        schedule.step(epoch + 1)
    assert optimizer.param_groups[0]["lr"] < 0.001  # the schedule is at its end
    return weights_of(model)


@pytest.mark.cpu("timm's model draws its weights on a CPU")
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_timms_own_saver_and_resuming_give_the_same_bits(ranks, tmp_path, mesh):
    without_a_break = ranks.run(trained, mesh, folder=str(tmp_path), resumed=False)
    for weights in ranks.run(trained, mesh, folder=str(tmp_path), resumed=True):
        assert weights.keys() == without_a_break[0].keys()
        assert [name for name, value in weights.items() if not torch.equal(value, without_a_break[0][name])] == []
    plain = task_of().get_trainable_module()
    plain.load_state_dict(torch.load(tmp_path / "checkpoint-2.pth.tar")["state_dict"])
    assert all(torch.equal(value, without_a_break[0][name]) for name, value in plain.named_parameters())
