"""Muon takes weights of the classes in `dmuon.views.by_class`, which a user extends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn
from dmuon._setup.routing import route
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers.pytorch_utils import Conv1D

import dmuon
from dmuon import View, views


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 4))
        self.other = nn.Parameter(torch.zeros(3, 4))


class FusedLinear(nn.Linear):
    pass


class TopKRouter(Fused):
    pass


@pytest.fixture(autouse=True)
def _by_class_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(views, "by_class", dict(views.by_class))


def muons(model: nn.Module) -> dict[str, tuple[str, View]]:
    return {row.name: (row.why, *row.views) for row in route(model, None)[1] if row.algorithm == "muon"}


def whole(why: str, **shapes: tuple[int, int]) -> dict[str, tuple[str, View]]:
    return {name.replace("__", "."): (why, View(1, *shape)) for name, shape in shapes.items()}


RECURRENT = {"weight_ih_l0": (20, 3), "weight_hh_l0": (20, 2), "weight_hr_l0": (2, 5)}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (FusedLinear(4, 12), whole("matrix of Linear", weight=(12, 4))),
        (Conv1D(12, 4), {"weight": ("matrix of Conv1D", View(1, 4, 12, transposed=True))}),
        (
            nn.MultiheadAttention(4, 2),
            whole("matrix of MultiheadAttention; if it holds several, see dmuon.views.qkv", in_proj_weight=(12, 4))
            | whole("matrix of Linear", out_proj__weight=(4, 4)),
        ),
        (
            nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
            whole("matrix of MultiheadAttention", q_proj_weight=(4, 4), k_proj_weight=(4, 3), v_proj_weight=(4, 5))
            | whole("matrix of Linear", out_proj__weight=(4, 4)),
        ),
        (
            nn.ModuleDict({"wqkv": nn.Linear(4, 12, bias=False)}),
            whole(
                "matrix of Linear; if it holds several, see dmuon.views.per_head or interleaved, or qkv if all rows of "
                "Q come first",
                wqkv__weight=(12, 4),
            ),
        ),
        (nn.LSTM(3, 5, proj_size=2), whole("matrix of RNNBase", **RECURRENT)),
        (nn.GRUCell(3, 5), whole("matrix of RNNCellBase", weight_ih=(15, 3), weight_hh=(15, 5))),
        (TopKRouter(), whole("matrix of a router, by its class's name", weight=(12, 4))),
        (Fused(), {}),
        (nn.Bilinear(3, 4, 5), {}),
        (nn.Linear(4, 1), {}),
        (nn.Linear(1, 4), {}),
    ],
    ids=[
        *("linear", "Conv1D", "attention", "attention of other sizes", "wqkv", "LSTM", "GRU cell", "router"),
        *("unknown class", "bilinear", "one row", "one column"),
    ],
)
def test_muon_takes_weights_of_these_classes(model, expected):
    assert muons(model) == expected


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("linear_qkv", "per_head or interleaved, or qkv if all rows of Q come first"),
        ("in_proj_qkv", "rows"),
        ("in_proj_qkvz", "interleaved"),
        ("in_proj_ba", "interleaved"),
        ("w12", "gate_up"),
        ("adaLN_modulation", "rows"),
    ],
)
def test_a_name_suggests_a_view(name, view):
    layer = nn.Linear(4, 12, bias=False)
    inside = nn.Sequential(nn.SiLU(), layer) if name == "adaLN_modulation" else layer
    ((why, _),) = muons(nn.ModuleDict({name: inside})).values()
    assert why == f"matrix of Linear; if it holds several, see dmuon.views.{view}"


@pytest.mark.parametrize("key", [Fused, f"{__name__}.Fused"])
def test_a_user_adds_classes(key):
    views.by_class[key] = {"weight": views.qkv}
    assert muons(Fused()) == {"weight": ("matrix of Fused", View(3, 4, 4))}
    assert muons(TopKRouter())["weight"] == ("matrix of Fused", View(3, 4, 4))  # of a subclass too


def test_the_nearest_class_counts_and_an_empty_rule_leaves_all_to_adamw():
    views.by_class[FusedLinear] = {}
    assert muons(nn.Sequential(FusedLinear(4, 12), nn.Linear(4, 12))) == whole(
        "matrix of Linear", **{"1__weight": (12, 4)}
    )
    assert route(FusedLinear(4, 12), None)[1][0].why == "left out in dmuon.views.by_class: FusedLinear"
    views.by_class[FusedLinear] = {"w*": views.gate_up}
    assert muons(FusedLinear(4, 12)) == {"weight": ("matrix of FusedLinear", View(2, 6, 4))}


@pytest.mark.parametrize(
    ("layer", "view"),
    [
        (nn.Conv2d(3, 8, 2), View(1, 8, 12)),
        (nn.Conv2d(6, 8, 2, groups=2), View(2, 4, 12)),
        (nn.ConvTranspose1d(6, 8, 5, groups=2), View(2, 3, 20, transposed=True)),  # stored as [in, out / groups, k]
    ],
)
def test_convolutions_can_be_added(layer, view):
    cls = type(layer)
    views.by_class[cls] = {"weight": views.conv}
    assert muons(layer) == {"weight": (f"matrix of {cls.__name__}", view)}


@pytest.mark.parametrize("layer", [nn.Conv1d(6, 8, 3, groups=2), nn.ConvTranspose1d(6, 8, 3, groups=2)])
def test_each_matrix_of_a_convolution_reads_the_inputs_of_one_group(layer):
    views.by_class[type(layer)] = {"weight": views.conv}
    ((_, view),) = muons(layer).values()
    with torch.no_grad():
        matrices = list(view.matrices(layer.weight))
        matrices[1].zero_()
        outputs = layer(torch.randn(1, 6, 9)) - layer.bias[:, None]
    assert outputs[0, :4].all() and not outputs[0, 4:].any()


def test_a_depthwise_convolution_is_adamws():
    views.by_class[nn.Conv2d] = {"weight": views.conv}
    row = route(nn.Conv2d(8, 8, 3, groups=8), None)[1][0]
    assert (row.algorithm, row.why) == ("adamw", "a side of 1")


@pytest.mark.parametrize(
    "rule",
    [views.matrix, {"weight": View(1, 12, 4)}, {1: views.matrix}, ["weight"]],
    ids=["function", "view", "key", "list"],
)
def test_what_is_no_rule_is_refused(rule):
    views.by_class[Fused] = rule
    with pytest.raises(
        ValueError, match=r"^dedicate_params: views.by_class: expected a class of modules, or its .*Fused"
    ):
        dmuon.dedicate_params(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (lambda p: View(1, 12, 5), "expected a view of all 48 elements of 'weight'"),
        (lambda p: None, "got None"),
        (
            views.experts,
            "raised ValueError for 'weight': views.experts: parameter: expected",
        ),
    ],
    ids=["of another size", "none", "raises"],
)
def test_a_rule_that_does_not_fit_names_class_and_parameter(rule, problem):
    views.by_class[Fused] = {"weight": rule}
    with pytest.raises(ValueError, match=r"^inventory: views.by_class\[Fused\]\['weight'\]: ") as caught:
        dmuon.inventory(Fused())
    assert problem in str(caught.value)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "compute",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        weight_norm,
        spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
)
def test_what_a_weight_is_computed_from_is_adamws(compute):
    model = compute(nn.Linear(4, 6, bias=False))
    rows = route(model, None)[1]
    assert rows and {row.why for row in rows if row.shape == (6, 4)} == {"a weight is computed from it"}
    assert {row.algorithm for row in rows} == {"adamw"}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_so_it_is_in_a_recurrent_layer():
    model = weight_norm(nn.LSTM(3, 5), "weight_hh_l0")
    assert muons(model) == whole("matrix of RNNBase", weight_ih_l0=(20, 3))
