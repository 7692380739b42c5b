"""QK-clip refuses by name, on every rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions import KINDS, make_model
from checkpoints import unlike
from models import batch, loss_of, part
from refusals import REFUSED, Refusals, dedicated, expect_refusal, messages_of
from test_qk_clip import started
from test_qk_clip_logits import hidden
from tp_models import OnRanks
from training import AHEAD, dedicate, place_of, shard, weights_of

import dmuon

refused = Refusals()


@refused("QKClip: tau: expected a positive number, got 0", tau=0)
@refused("QKClip: tau: expected a positive number, got nan", tau=float("nan"))
@refused("QKClip: tau: expected a positive number, got True", tau=True)
@refused("QKClip: model: expected an attention module of a class in dmuon.attention.by_class, got none")
def a_model(mesh: Any, **options: Any) -> None:
    model = dedicated(mesh)
    dmuon.Muon(model)
    dmuon.QKClip(model, **options)


@refused("ranks differ", "tau 3.0", "tau 2.0")
def a_tau_of_one_rank(mesh: Any) -> None:
    started(mesh, "grouped", 2.0 + (place_of(mesh)[0] == 1))


@refused("QKClip's tau = 5.0", "QKClip's tau = 2.0", late=True)
@refused("QKClip: model: expected one QKClip a model, got a second one", late=False)
def a_second_one(mesh: Any, late: bool) -> None:
    model, opt, clip = started(mesh, "grouped", 2.0)
    if not late:
        dmuon.QKClip(model)
    clip.tau = 5.0 if place_of(mesh)[0] == 2 else 2.0
    loss_of(model, part(batch(0), *place_of(mesh))).backward()
    opt.step()


@refused("'blocks.0.attention'", "got a norm behind the projections", heads={"normed": True})
@refused("'blocks.0.attention.other.weight': expected a matrix that Muon updates, got no such", heads={"key": "other"})
@refused("'blocks.0.attention.q.weight': expected a row 29, of a head, got 24 rows", heads={"num_heads": 5})
@refused("expected each row in one head, got rows from 0 on in two", heads={"key": "q"})
@refused("attention.by_class[Grouped]: 'blocks.0.attention': Heads: num_kv_heads: expected", heads={"num_kv_heads": 3})
@refused("'blocks.0.attention': raised TypeError", heads={"wrong": 3})
def heads(mesh: Any, heads: dict[str, Any]) -> None:
    own = dmuon.attention.by_class[KINDS["grouped"]]
    options = {"num_heads": 4, "head_dim": 6, "num_kv_heads": None, "query": "q", "key": "k", **heads}
    if options["num_kv_heads"] is None and options["num_heads"] == 4:
        options["num_kv_heads"] = 2
    if options["num_heads"] == 5:
        options["num_kv_heads"] = 1
    dmuon.attention.by_class[KINDS["grouped"]] = lambda module: dmuon.attention.Heads(**options)
    try:
        started(mesh, "grouped", 2.0)
    finally:
        dmuon.attention.by_class[KINDS["grouped"]] = own


@refused("'blocks.0.attention.q.weight': expected a matrix that Muon updates, got one of AdamW's", of="q.weight")
@refused(
    "'blocks.0.attention.q.weight': expected a matrix that Muon updates, got a frozen one", of="q.weight", frozen=True
)
@refused("beside 'blocks.0.attention.k.weight': expected a trainable one of shape (12,)", of="k.bias", frozen=True)
def a_projection(mesh: Any, of: str, frozen: bool = False) -> None:
    model = make_model("grouped")
    name = f"blocks.0.attention.{of}"
    if frozen:
        model.get_parameter(name).requires_grad_(False)
    dedicate(model, mesh, AHEAD, select=lambda n, module, parameter: False if n == name and not frozen else None)
    shard(model, mesh)
    dmuon.Muon(model)
    dmuon.QKClip(model)


@refused(
    "QKClip: 'blocks.0.attention': expected a forward that calls", "got no such call", "clip.observe", all_ranks=True
)
@refused("QKClip: 'blocks.0.attention': expected a forward that calls", all_ranks=False)
@refused("QKClip: 'blocks.0.attention': expected a forward that calls", all_ranks=True, frozen=True)
def attention_without_logits(mesh: Any, all_ranks: bool, frozen: bool = False) -> None:
    """No backward runs through what is `frozen`, the first attention too."""
    model, opt, clip = hidden(mesh)
    for module in (model.embedding, model.blocks[0]) if frozen else ():
        module.requires_grad_(False)
    loss_of(model, part(batch(0), *place_of(mesh))).backward()
    for name in clip.max_logits if not all_ranks and place_of(mesh)[0] != 3 else ():
        clip.observe(name, torch.zeros(4))
    opt.step()


@refused(
    "QKClip.observe: name: expected one of ['blocks.0.attention', 'blocks.1.attention'], got 'x'", name="x", size=4
)
@refused(
    "QKClip.observe: maxima: expected a floating tensor of shape (4,) for 'blocks.1.attention'",
    name="blocks.1.attention",
    size=3,
)
def maxima(mesh: Any, name: str, size: int) -> None:
    hidden(mesh)[2].observe(name, torch.zeros(size))


@refused("QKClip: tau: expected inf, with which this QKClip was made, got 3")
def a_tau_of_one_that_only_logs(mesh: Any) -> None:
    hidden(mesh, math.inf)[2].tau = 3


@pytest.mark.parametrize(REFUSED, refused)
def test_what_does_not_fit_is_refused_by_name_on_every_rank(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


def with_slices(mesh: Any) -> None:
    dmuon.QKClip(OnRanks(mesh.device_type, (2, 2)).model, math.inf)


def test_tensor_parallelism_is_refused_on_every_rank(ranks):
    for message in messages_of(ranks, with_slices, (4,)):
        assert "QKClip: model: expected no tensor parallelism, got slices of 2 ranks" in message


def two_models(mesh: Any) -> list[bool]:
    """Trains a model with QKClip and one without in turn. Returns if their weights moved."""
    model, opt, clip = started(mesh, "latent", 1.0)
    other, of_other, _ = started(mesh, "torchs", math.inf)
    plain = dedicated(mesh)
    of_plain = dmuon.Muon(plain)
    before = weights_of(plain)
    for number in range(2):
        for one, optimizer in ((model, opt), (other, of_other), (plain, of_plain)):
            loss_of(one, part(batch(number), *place_of(mesh))).backward()
            optimizer.step()
            optimizer.zero_grad()
    logits = clip.max_logits["blocks.0.attention"]
    return [bool(logits.isfinite().all()), bool(unlike(weights_of(plain), before))]


def test_models_with_other_numbers_of_heads_train_beside_each_other(ranks):
    assert ranks.run(two_models, (2, 2)) == [[True, True]] * 4
