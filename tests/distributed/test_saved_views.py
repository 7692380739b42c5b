"""A checkpoint says by which views its matrices were orthogonalised, and goes on with these alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
import torch.nn as nn
from checkpoints import full_state, group_of, unlike
from mixture import make_mixture, select
from test_views import loss_of
from training import AHEAD, dedicate, place_of, shard

import dmuon

HEADS = "blocks.1.heads.weight"
IN_PLACE = ("step", "exp_avg", "exp_avg_sq")  # what dcp.load itself fills


def whole_heads(name: str, module: nn.Module, parameter: nn.Parameter) -> Any:
    return None if name == HEADS else select(name, module, parameter)


def other_heads(name: str, module: nn.Module, parameter: nn.Parameter) -> Any:
    return dmuon.views.per_head(parameter, 6) if name == HEADS else select(name, module, parameter)


def transposed_heads(name: str, module: nn.Module, parameter: nn.Parameter) -> Any:
    return (
        dmuon.views.transposed(dmuon.views.matrix(parameter)) if name == HEADS else whole_heads(name, module, parameter)
    )


SELECTS = {"heads": select, "whole": whole_heads, "other": other_heads, "transposed": transposed_heads}


def started(mesh: Any, views: str, steps: int) -> tuple[nn.Module, Any]:
    model = make_mixture()
    dedicate(model, mesh, AHEAD, select=SELECTS[views])
    if mesh is not None:
        shard(model, mesh)
    optimizer = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    for step in range(steps):
        loss_of(model, step, *place_of(mesh)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def moved(mesh: Any, directory: str, how: str, loaded_by: str) -> tuple[str, list[str], list[str]]:
    """(the error or "", what it has changed, what of the optimizer is not as it was saved once views are accepted)."""
    model, optimizer = started(mesh, "heads", 1)
    saved = full_state(model, optimizer)
    options = dsd.StateDictOptions(
        flatten_optimizer_state_dict=how == "flattened",
        full_state_dict=how == "full",
        broadcast_from_rank0=how == "full",
    )
    state = dsd.get_optimizer_state_dict(model, optimizer, options=options)
    if how != "full":
        dcp.save({"optimizer": state}, checkpoint_id=directory, **group_of(mesh))
    model, optimizer = started(mesh, loaded_by, 1)
    before = full_state(model, optimizer)
    if how != "full":
        state = dsd.get_optimizer_state_dict(model, optimizer, options=options)
        dcp.load({"optimizer": state}, checkpoint_id=directory, **group_of(mesh))
    message, changed = "", []
    try:
        dsd.set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=options)
    except ValueError as error:
        message = str(error)
        changed = [name for name in unlike(full_state(model, optimizer), before) if not name.endswith(IN_PLACE)]
        optimizer.accepts_other_views = True
        dsd.set_optimizer_state_dict(model, optimizer, state, options=options)
    return message, changed, unlike(full_state(model, optimizer)["optimizer"], saved["optimizer"])


@pytest.mark.parametrize(("mesh", "how"), [((2, 2), "nested"), ((4,), "flattened"), ((2, 2), "full")])
def test_the_same_views_go_on_and_others_are_refused_by_name_unless_they_are_accepted(ranks, mesh, how, tmp_path):
    def found(loaded_by: str) -> list[tuple[str, list[str], list[str]]]:
        return ranks.run(moved, mesh, directory=str(tmp_path / loaded_by), how=how, loaded_by=loaded_by)

    assert found("heads") == [("", [], [])] * 4
    for message, changed, differing in found("whole"):
        assert f"views: '{HEADS}' was 4 of 3 x 12 and is one matrix now. " in message
        assert "accepts_other_views = True of the dmuon.Muon itself" in message
        assert changed == differing == []


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "words"),
    [
        ("whole", "heads", "was one matrix and is 4 of 3 x 12 now."),
        ("heads", "other", "was 4 of 3 x 12 and is 2 of 6 x 12 now."),
        ("whole", "transposed", "was one matrix and is 12 x 12 transposed now."),
    ],
)
def test_every_kind_of_difference_is_seen(saved_by, loaded_by, words):
    saved = started(None, saved_by, 1)[1].state_dict()
    _, optimizer = started(None, loaded_by, 1)
    with pytest.raises(ValueError) as caught:
        optimizer.load_state_dict(saved)
    assert f"Muon.load_state_dict: views: '{HEADS}' {words}" in str(caught.value)


def test_of_many_differences_some_are_named():
    saved = started(None, "heads", 1)[1].state_dict()
    saved["param_groups"][0]["algorithm"] = "muon {}"
    _, optimizer = started(None, "heads", 1)
    with pytest.raises(
        ValueError, match=r"'blocks.0.heads.weight' was .*; 'blocks.0.qkv.weight' was .* and 24 more\. "
    ):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("views", ["heads", "whole"])
def test_views_of_a_name_that_is_no_matrix_here_are_no_proof(views):
    """As a state dict has whose keys were renamed."""
    saved = started(None, "heads", 1)[1].state_dict()
    group = saved["param_groups"][0]
    group["algorithm"] = group["algorithm"].replace("blocks.", "model.blocks.")
    _, optimizer = started(None, views, 1)
    with pytest.raises(
        ValueError, match=r"has not, 'model.blocks.0.conv.weight', .* and \d+ more\. Expected: the model"
    ):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("algorithm", ["muon", None])
def test_what_says_of_no_views_goes_on(algorithm):
    """As older checkpoints do, and torch.optim.Muon's, which have no algorithm either."""
    model, optimizer = started(None, "heads", 2)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = full_state(model, optimizer)["optimizer"]
    for group in saved["param_groups"]:
        group.pop("algorithm")
    if algorithm:
        saved["param_groups"][0]["algorithm"] = algorithm
    model, optimizer = started(None, "other", 1)
    optimizer.load_state_dict(saved)
    assert unlike(full_state(model, optimizer)["optimizer"], expected) == []
    assert optimizer.param_groups[0]["algorithm"] == "muon"


@pytest.mark.parametrize("views", ["3 of 4 x 12", "[1]"])
def test_what_is_no_text_of_views_is_refused(views):
    _, optimizer = started(None, "heads", 1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["algorithm"] = f"muon {views}"
    with pytest.raises(ValueError, match=r"Muon.load_state_dict: algorithm: expected views as dmuon saves them, got"):
        optimizer.load_state_dict(saved)


def differing_views(mesh: Any) -> str:
    """Rank 1 alone has saved them otherwise."""
    _, optimizer = started(mesh, "heads", 1)
    saved = optimizer.state_dict()
    if place_of(mesh)[0] == 1:
        saved["param_groups"][0]["algorithm"] = "muon {}"
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        return str(error)
    return ""


def test_what_one_rank_alone_finds_all_ranks_raise(ranks):
    for message in ranks.run(differing_views, (4,)):
        assert "views: 'blocks.0.heads.weight' was one matrix" in message
