"""What the routing table says of a whole model, and names under wrappers."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn as nn
from dmuon._setup.routing import route
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import dmuon


class Stack(nn.Module):
    """A stack of `number` matrices of 8 x 8 in one parameter, beside a matrix and norms."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.dense = nn.Linear(8, 40, bias=False)
        self.stack = nn.Parameter(torch.zeros(number, 8, 8))


def warnings_of(
    caplog: pytest.LogCaptureFixture, model: nn.Module, about: str = "AdamW updates", **options
) -> list[str]:
    with caplog.at_level(logging.WARNING, "dmuon"):
        dmuon.dedicate_params(model, **options)
    return [record.getMessage() for record in caplog.records if record.name == "dmuon" and about in record.getMessage()]


def test_the_table_ends_with_muons_share_of_what_is_trained():
    model = Stack(2)
    model.norm.weight.requires_grad_(False)
    _, table = route(model, None)
    assert str(table).splitlines()[0].split() == ["parameter", "shape", "updated", "by", "owner", "unit", "why"]
    # 8 x 40 of 8 x 40 + 8 (the norm's bias) + 2 x 8 x 8.
    assert str(table).splitlines()[-1] == "Muon updates 70.2% of 456 trainable weights, AdamW the others"
    optimizer_says = dmuon.RoutingTable(table, "and a note")
    assert str(optimizer_says).splitlines()[-2:] == [str(table).splitlines()[-1], "and a note"]


def test_the_table_of_an_optimizer_says_adamws_learning_rate():
    model = Stack(2)
    dmuon.dedicate_params(model)
    dmuon.Muon(model, adamw_lr=0.5)
    assert dmuon.routing_table(model).note == "AdamW: lr 0.5"


def test_a_model_without_weights_has_a_table():
    assert "0 trainable weights" in str(route(nn.Identity(), None)[1])


def test_a_large_stack_of_matrices_that_adamw_gets_is_warned_of_once(caplog):
    (message,) = warnings_of(caplog, Stack(2))
    assert "AdamW updates 'stack' (2x8x8) of test_routing.Stack: " in message
    assert "dmuon.views.by_class[Class] = {'weight': dmuon.views.matrix}" in message
    assert "a dmuon.View, such as dmuon.views.experts(parameter)" in message


@pytest.mark.parametrize(("number", "warned"), [(1, True), (0, False)])
def test_small_and_empty_ones_are_not(caplog, number, warned):
    model = Stack(number)
    model.wide = nn.Linear(8, 100, bias=False)  # 8 x 8 are 5.4 % of all
    assert bool(warnings_of(caplog, model)) == warned
    model = Stack(1)
    model.wide = nn.Linear(8, 120, bias=False)  # 8 x 8 are 4.7 % of all
    caplog.clear()
    assert not warnings_of(caplog, model)


class ByHand(nn.Module):
    """Multiplies by a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))


@pytest.mark.parametrize(("number", "warned"), [(3, True), (1, False)])
def test_so_are_matrices_of_a_class_without_a_rule_by_their_sum(caplog, number, warned):
    model = nn.Sequential(nn.Linear(200, 8, bias=False), *(ByHand() for _ in range(number)))  # 3.8 % of all each
    messages = warnings_of(caplog, model)
    assert len(messages) == warned
    assert not warned or "AdamW updates '1.weight' (8x8) and 2 more of test_routing.ByHand: " in messages[0]


def test_a_class_that_the_user_has_named_is_not(caplog, monkeypatch):
    for rule in ({"weight": dmuon.views.matrix}, {}):
        monkeypatch.setitem(dmuon.views.by_class, ByHand, rule)
        assert not warnings_of(caplog, nn.Sequential(ByHand()))


class Weighs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))


def test_entries_of_the_users_table_that_fit_nothing_are_warned_of_once(caplog, monkeypatch):
    matrix = dmuon.views.matrix
    entries = {
        nn.Linear: {"weight": matrix, "wait": matrix},
        Weighs: {"weight": matrix, "wieght": matrix, "bias_?": matrix},
        "elsewhere.Weighs": {"weight": matrix},
        f"{__name__}.Weighs": {"w*": matrix},
        nn.Module: {"we?ght": matrix},
        Stack: {},
    }
    monkeypatch.setattr(dmuon.views, "by_class", {**dmuon.views._BY_DEFAULT, **entries})
    (message,) = warnings_of(caplog, nn.Sequential(Weighs(), nn.Linear(8, 8)), "fit nothing in this model")
    assert message.split(":")[1].strip() == (
        "by_class[Linear]['wait'], by_class[Weighs]['wieght'], by_class[Weighs]['bias_?'], "
        "by_class['elsewhere.Weighs'], by_class[Stack]"
    )
    caplog.clear()
    assert not warnings_of(caplog, nn.Sequential(Weighs(), nn.Linear(8, 8)), "fit nothing in this model")
    dmuon.views.by_class[nn.Bilinear] = {"weight": matrix}  # fits the first of two models
    for model in (nn.Sequential(nn.Bilinear(8, 8, 8), nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))):
        assert not warnings_of(caplog, model, "fit nothing in this model")


def test_neither_are_frozen_ones_nor_those_that_the_user_left_to_adamw(caplog):
    assert not warnings_of(caplog, Stack(2), select=lambda name, *_: False if name == "stack" else None)
    model = Stack(2)
    model.stack.requires_grad_(False)
    assert not warnings_of(caplog, model)


def test_wrappers_change_neither_names_nor_routes():
    def layers() -> list[nn.Module]:
        return [nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5)]

    def named(body: nn.Module, head: nn.Module, embedding: nn.Module) -> nn.Module:
        model = nn.Module()
        model.emb, model.up, model.lm_head = embedding, body, head
        return model

    embedding, body, head = layers()
    plain = route(named(body, head, embedding), None)[1]
    wrapped = named(
        checkpoint_wrapper(torch.compile(body, backend="eager")),
        torch.compile(head, backend="eager"),
        checkpoint_wrapper(embedding),
    )
    assert route(wrapped, None)[1] == plain
    assert [row.name for row in plain if row.algorithm == "muon"] == ["up.weight"]


class Converted(torch.Tensor):
    """As libraries for float8 make them: its memory need not hold what it shows."""


def test_matrices_that_adamw_gets_because_of_their_class_are_warned_of_once(caplog):
    model = nn.Sequential(nn.Embedding(10, 8), *(nn.Linear(8, 8) for _ in range(3)))
    for module in model:
        module.weight = nn.Parameter(module.weight.detach().as_subclass(Converted))
    model[1].requires_grad_(False)
    (message,) = warnings_of(caplog, model)
    assert "'2.weight' and 1 more (a Converted), because" in message


def test_matrices_that_adamw_gets_because_of_their_dtype_are_warned_of_once(caplog):
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).double()
    (message,) = warnings_of(caplog, model)
    assert "'1.weight' and 1 more (dtype torch.float64), because" in message
    caplog.clear()
    assert warnings_of(caplog, nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8).double())) == []


def test_verify_does_not_agree_with_nothing():
    model = nn.Sequential(nn.Linear(8, 8)).double()
    dmuon.dedicate_params(model)
    verdict = str(dmuon.verify(model, dmuon.Muon(model)))
    assert verdict == "verdict: Muon has no matrix of this model, so nothing was compared"
