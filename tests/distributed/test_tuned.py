"""What `dmuon tune` has kept at slot 0 is what all ranks run; training times nothing."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import torch
from dmuon._planning.choices import Result, Setting, store
from dmuon._setup.hyperparameters import PlainChoice, plain_choice
from models import batch, is_matrix_of_a_block, loss_of, make_gpt, part, weights_of_plain
from reference import ReferenceMuon
from scenario import assert_equal_to_reference
from training import LR, NO_COPY, WEIGHT_DECAY, dedicate, place_of, shard, weights_of

import dmuon
from dmuon import _C

STEPS = 3
SHAPES = [(72, 24), (24, 24), (41, 24), (24, 41)]


def keep_others(setting: Setting) -> dict[tuple[int, int], PlainChoice]:
    """Keeps of each shape what is not the default, another form; says what."""
    found = {}
    for sides in SHAPES:
        default, *others = setting.candidates(*sides)
        other = next(one for one in others if one.form != default.form)
        found[sides] = plain_choice(other)
        store(Result(8, *sides, *found[sides], 1, 1e-6, *plain_choice(default), 2, 1e-6, 0.5), setting)
    return found


def trained(mesh: Any, folders: tuple[str, ...], kept_at: tuple[int, ...]) -> tuple[Any, ...]:
    """Weights after some steps, where ranks have caches of their own; what was kept here, and what ran."""
    rank, size = place_of(mesh)
    with mock.patch.dict(os.environ, DMUON_CACHE_DIR=folders[rank]):
        rows = _C.resolve_coefficients("polar_express", 5)
        setting = Setting(torch.device(mesh.device_type), torch.float32, rows)
        kept = keep_others(setting) if rank in kept_at else {}
        model = make_gpt()
        dedicate(model, mesh, NO_COPY)
        shard(model, mesh)
        optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
        for step in range(STEPS):
            loss_of(model, part(batch(step), rank, size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ran = {sides: plain_choice(one) for sides, one in optimizer._runtime.tuned.choices.items()}
        verdict = bool(dmuon.verify(model, optimizer))
    return weights_of(model), kept, ran, "dmuon._planning.tuning" in sys.modules, verdict


def reference() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = make_gpt()
    before = weights_of_plain(model)
    names = [name for name, parameter in model.named_parameters() if is_matrix_of_a_block(name, parameter)]
    optimizer = ReferenceMuon(model, names, LR, WEIGHT_DECAY)
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, weights_of_plain(model)


def test_all_ranks_train_by_what_slot_0_has_kept_and_only_by_that(ranks, tmp_path):
    def run(name: str, *kept_at: int) -> list[Any]:
        folders = tuple(str(tmp_path / f"{name}{rank}") for rank in range(2))
        return ranks.run(trained, (1, 2), folders=folders, kept_at=kept_at)

    by_default, by_choice, by_other = run("none"), run("first", 0), run("second", 1)
    before, expected = reference()
    for results in (by_default, by_choice, by_other):
        for weights, _, _, has_tuned, verdict in results:
            assert_equal_to_reference(before, expected, weights)
            assert not has_tuned
            assert verdict
    chosen = by_choice[0][1]
    assert set(chosen) == set(SHAPES)
    assert [ran for _, _, ran, *_ in by_choice] == [chosen] * 2
    assert [ran for _, _, ran, *_ in by_other] == [{}] * 2 and by_other[1][1] == chosen
    matrices = [name for name in before if "blocks" in name and before[name].ndim == 2]
    for (default, *_), (tuned, *_), (other, *_) in zip(by_default, by_choice, by_other, strict=True):
        assert all(torch.equal(default[name], other[name]) for name in default)
        assert not any(torch.equal(default[name], tuned[name]) for name in matrices)
        assert all(torch.equal(tuned[name], by_choice[0][0][name]) for name in default)
