"""dmuon.update_stats: figures of the last update, beside those that one process computes from whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batch, loss_of, make_gpt, part
from refusals import REFUSED, Refusals, dedicated, expect_refusal
from training import AHEAD, KEPT_NO_COPY, NO_COPY, REPLICATED, Schedule, dedicate, place_of, shard

import dmuon

STEPS = 3
ROWS = {"blocks.0.qkv.weight": [48, 24]}  # of the matrices in a leaf that has several


def by_rows(name: str, module: Any, parameter: Any) -> Any:
    return dmuon.views.rows(parameter, ROWS[name]) if name in ROWS else None


def figures(mesh: Any, schedule: Schedule, rule: str = "muon", **options: Any) -> list[dict[str, Any]]:
    """Returns for each leaf and step the weights' change, the cosine of gradient and momentum before, the figures."""
    model = make_gpt(depth=2)
    dedicate(model, mesh, schedule, **options)
    shard(model, mesh)
    optimizer = dmuon.Muon(model, lr=2e-2, ns_dtype=torch.float32, rule=rule)
    runtime = optimizer._runtime
    names = [leaf.name for leaf in runtime.leaves]

    def whole(name: str) -> dict[str, torch.Tensor]:
        return {leaf: runtime.gathered(index, name).clone() for index, leaf in enumerate(names)}

    seen = []
    for step in range(STEPS):
        loss_of(model, part(batch(step), *place_of(mesh))).backward()
        runtime.meet("a test")
        before, momenta, gradients = (whole(name) for name in ("master", "momentum_buffer", "gradient"))
        optimizer.record_stats = step != 1
        optimizer.step()
        torch.set_default_dtype(torch.bfloat16 if options else torch.float32)  # as some programs have it
        stats = dmuon.update_stats(model)
        torch.set_default_dtype(torch.float32)
        after = whole("master")
        optimizer.zero_grad()
        seen.append(
            {
                name: {
                    "change": after[name] - before[name],
                    "cosine": cosine_of(gradients[name], momenta[name], ROWS.get(name) if options else None),
                    "stats": tuple(value.item() for value in stats[name]),
                }
                for name in names
            }
        )
    return seen


def cosine_of(gradient: torch.Tensor, momentum: torch.Tensor, rows: list[int] | None) -> torch.Tensor:
    """The mean over matrices."""
    pairs = zip(*(of.split(rows or len(of)) for of in (gradient, momentum)), strict=True)
    return torch.stack([torch.cosine_similarity(g.flatten(), m.flatten(), dim=0) for g, m in pairs]).mean()


@pytest.mark.parametrize(
    ("mesh", "schedule", "rule"),
    [
        ((2, 2), AHEAD, "muon"),
        ((4,), KEPT_NO_COPY, "normuon"),
        ((4, 1), NO_COPY, "muon"),
        ((2, 2), REPLICATED, "adamuon"),
        ((1,), AHEAD, "muon"),
    ],
)
def test_figures_are_those_of_whole_tensors_on_every_rank(ranks, mesh, schedule, rule):
    results = ranks.run(figures, mesh, schedule=schedule, rule=rule)
    for seen in results:
        assert [{name: of["stats"] for name, of in step.items()} for step in seen] == [
            {name: of["stats"] for name, of in step.items()} for step in results[0]
        ]
        for step in 0, 2:
            for name, of in seen[step].items():
                rms, spectral_norm, residual, cosine = of["stats"]
                assert rms == pytest.approx(float(of["change"].square().mean().sqrt()), rel=1e-4), name
                assert cosine == pytest.approx(float(of["cosine"]), abs=1e-4), name
                # polar_express leaves singular values between 0.85 and 1.12, or below if they began near 0.
                assert 0.8 < spectral_norm < 1.2 and 0 <= residual < 1, name
        # A step that is not recorded leaves the figures of the last one that was.
        assert [of["stats"] for of in seen[1].values()] == [of["stats"] for of in seen[0].values()]


def test_a_parameter_of_several_matrices_has_the_figures_of_all(ranks):
    for seen in ranks.run(figures, (2, 2), schedule=AHEAD, select=by_rows):
        for step in 0, 2:
            for name in ROWS:
                of = seen[step][name]
                assert of["stats"][0] == pytest.approx(float(of["change"].square().mean().sqrt()), rel=1e-4)
                assert of["stats"][3] == pytest.approx(float(of["cosine"]), abs=1e-4)


refused = Refusals()


@refused("update_stats: model: expected a step with optimizer.record_stats = True, got none")
def before_a_step(mesh: Any) -> None:
    model = dedicated(mesh)
    dmuon.Muon(model)
    dmuon.update_stats(model)


@refused("Muon: record_stats: expected False with 'blocks.0.qkv.weight', whose view interleaves its rows, got True")
def of_interleaved_rows(mesh: Any) -> None:
    model = make_gpt(depth=1)

    def select(name: str, module: Any, parameter: Any) -> Any:
        return dmuon.views.interleaved(parameter, [3, 1]) if name == "blocks.0.qkv.weight" else None

    dedicate(model, mesh, {}, select=select)
    optimizer = dmuon.Muon(model)
    optimizer.record_stats = True
    loss_of(model, part(batch(0), *place_of(mesh))).backward()
    optimizer.step()


@refused("Muon: record_stats: expected True or False, got 1", on=1)
@refused("record_stats = True", "record_stats = False", on=None)
def of_one_rank(mesh: Any, on: Any) -> None:
    model = dedicated(mesh)
    optimizer = dmuon.Muon(model)
    optimizer.record_stats = mesh.get_rank() == 0 if on is None else on
    loss_of(model, part(batch(0), *place_of(mesh))).backward()
    optimizer.step()


@pytest.mark.parametrize(REFUSED, refused)
def test_what_cannot_be_recorded_is_refused_by_name_on_every_rank(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
