"""Hyperparameters of both algorithms: which are refused and by what name, and the update that a group's make."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from dmuon._setup.hyperparameters import (
    check_group,
    native_group,
    plain,
    rate_of,
    resolved_coefficients,
    settings_of,
)

from dmuon import _C

QUINTIC = (3.4445, -4.7750, 2.0315)
MUON = {
    "algorithm": "muon",
    "lr": 0.02,
    "weight_decay": 0.1,
    "momentum": 0.5,
    "nesterov": True,
    "ns_coefficients": "quintic",
    "eps": 1e-7,
    "ns_steps": 2,
    "adjust_lr_fn": None,
    "ns_dtype": torch.float32,
}
ADAMW = {"algorithm": "adamw", "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *((name, -1.0, rf"{name}: expected a number in \[0, inf\), got -1") for name in ("lr", "weight_decay", "eps")),
        *((name, math.nan, rf"{name}: expected a number .* got nan") for name in ("lr", "weight_decay", "eps")),
        ("lr", math.inf, r"lr: expected a number in \[0, inf\), got inf"),
        ("lr", 1e39, r"lr: expected a number that fp32 can hold, got 1e\+39"),
        ("lr", "fast", "lr: expected a number, got 'fast'"),
        ("lr", "0.02", "lr: expected a number, got '0.02'"),
        ("lr", None, "lr: expected a number, got None"),
        ("lr", True, "lr: expected a number, got True"),
        pytest.param("lr", 10**309, "lr: expected a number, got 1000", id="lr beyond fp64"),
        ("lr", Decimal("0.1"), r"lr: expected a number, got Decimal\('0.1'\)"),
        ("lr", torch.tensor(1j), r"lr: expected a number, got a Tensor of shape \(\)"),
        ("lr", torch.empty((), device="meta"), r"lr: expected a number, got a Tensor of shape \(\)"),
        ("lr", np.str_("0.1"), "lr: expected a number, got np.str_"),
        ("lr", np.complex64(1), "lr: expected a number, got np.complex64"),
        ("lr", torch.ones(2), r"lr: expected one element, got a tensor of shape \(2,\)"),
        ("momentum", 1.0, r"momentum: expected a number in \[0, 1\), got 1"),
        ("ns_steps", 0, r"ns_steps: expected an int in \[1, 99\], got 0"),
        ("ns_steps", 100, r"ns_steps: expected an int in \[1, 99\], got 100"),
        ("ns_steps", 5.0, r"ns_steps: expected an int in \[1, 99\], got 5.0"),
        ("ns_steps", True, r"ns_steps: expected an int in \[1, 99\], got True"),
        ("nesterov", 1, "nesterov: expected True or False, got 1"),
        ("ns_dtype", torch.int32, "ns_dtype: expected fp64, fp32, bf16, fp16 or None, got torch.int32"),
        ("ns_coefficients", "sextic", "^Muon: ns_coefficients: expected .*, got 'sextic'"),
        (
            "ns_coefficients",
            [(1.0, 2.0)],
            r"expected rows \(a, b, c\) or a name, got .*: a row is no list or tuple of three",
        ),
        ("ns_coefficients", [(1.0, 2.0, math.nan)], "^Muon: ns_coefficients: expected .* nan"),
        ("ns_coefficients", [], r"^Muon: ns_coefficients: expected .* or a name, got \[\] .*at least one row"),
        ("ns_coefficients", iter([QUINTIC]), r"^Muon: ns_coefficients: expected .* of type list_iterator"),
        ("ns_coefficients", torch.ones(5, 3), r"^Muon: ns_coefficients: expected .* of type Tensor"),
        ("ns_coefficients", [torch.ones(3)], r"^Muon: ns_coefficients: expected .* no list or tuple of three"),
        ("adjust_lr_fn", "slow", "slow"),
        ("adjust_lr_fn", "", "adjust_lr_fn: expected 'original', .* got ''"),
        ("adjust_lr_fn", False, "adjust_lr_fn: expected a name or None, got False"),
        ("algorithm", "sgd", "algorithm: expected 'muon' or 'adamw', got 'sgd'"),
        ("rule", "shampoo", "rule: expected one of .*, got 'shampoo'"),
        ("rule", "normuon", "expected a group with 'beta2', got one without"),
    ],
)
def test_a_bad_hyperparameter_of_muon_is_named(name, value, words):
    with pytest.raises(ValueError, match=words):
        check_group({**MUON, name: value})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lr", -1.0, r"^Muon: adamw_lr: expected a number in \[0, inf\), got -1"),
        ("weight_decay", math.inf, r"^Muon: adamw_weight_decay: expected a number in \[0, inf\), got inf"),
        ("eps", "small", "^Muon: adamw_eps: expected a number, got 'small'"),
        ("betas", 0.9, "^Muon: adamw_betas: expected two numbers, got 0.9"),
        ("betas", (0.9, 0.95, 0.99), "^Muon: adamw_betas: expected two numbers, got"),
        ("betas", (1.0, 0.95), r"^Muon: adamw_betas: expected a number in \[0, 1\), got 1"),
        ("betas", (0.9, -0.1), r"^Muon: adamw_betas: expected a number in \[0, 1\), got -0.1"),
        ("amsgrad", 1, "^Muon: adamw_amsgrad: expected True or False, got 1"),
        ("maximize", None, "^Muon: adamw_maximize: expected True or False, got None"),
        ("fused", "x", "^Muon: adamw_fused: expected True, False or None, got 'x'"),
        ("differentiable", True, "^Muon: adamw_differentiable: expected False, got True"),
    ],
)
def test_a_bad_hyperparameter_of_adamw_is_named(name, value, words):
    with pytest.raises(ValueError, match=words):
        check_group({**ADAMW, name: value})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": 0, "weight_decay": 0, "momentum": 0, "eps": 0},
        {"lr": torch.tensor(0.1), "momentum": torch.tensor([0.9])},
        {"ns_steps": 99, "ns_dtype": None, "nesterov": False},
        {"lr": np.float32(0.1), "eps": np.array([10]), "rule": "muon"},
        {"ns_coefficients": QUINTIC},
        {"ns_coefficients": [list(QUINTIC), [1, 2, 3]], "adjust_lr_fn": "match_rms_adamw"},
    ],
    ids=str,
)
def test_good_ones_pass_at_their_bounds_and_as_tensors(changes):
    check_group({**MUON, **changes})
    check_group(ADAMW)
    check_group({**ADAMW, "lr": torch.tensor(0.0), "betas": [0, torch.tensor(0.5)]})


@pytest.mark.parametrize("group", [MUON, ADAMW], ids=["muon", "adamw"])
def test_a_rate_that_rounding_has_put_below_0_counts_as_0(group):
    lr = group["lr"]
    below = {**group, "lr": -0.9e-12 * lr}
    check_group({**below, "initial_lr": lr})
    check_group(below, "", lr)
    check_group({**below, "lr": torch.tensor(below["lr"])}, "", lr)
    assert rate_of(below, lr) == 0.0 and rate_of(group, lr) == lr
    for bad, first in (({**below, "initial_lr": 0.5 * lr}, lr), (below, 0.5 * lr), (below, 0.0)):
        with pytest.raises(ValueError, match=r"lr: expected a number in \[0, inf\), got -"):
            check_group(bad, "", first)


@pytest.mark.parametrize(
    ("given", "steps", "rows"),
    [
        ("quintic", 3, [QUINTIC] * 3),
        (QUINTIC, 2, [QUINTIC] * 2),
        ([(1, 2, 3), (4, 5, 6)], 3, [(1, 2, 3), (4, 5, 6), (4, 5, 6)]),
        ([(1, 2, 3), (4, 5, 6)], 1, [(1, 2, 3)]),
    ],
    ids=["a name", "one row", "several rows", "more rows than steps"],
)
def test_coefficients_become_a_row_a_step(given, steps, rows):
    assert [tuple(row) for row in resolved_coefficients(given, steps)] == rows


def test_tensors_become_numbers_wherever_they_are():
    group = {"lr": torch.tensor(0.5), "betas": (torch.tensor([0.25]), 0.5), "nested": [[torch.tensor(2)]], "n": None}
    assert plain(group) == {"lr": 0.5, "betas": (0.25, 0.5), "nested": ((2.0,),), "n": None}
    assert isinstance(group["lr"], torch.Tensor)


def test_what_ranks_must_share_of_a_group_is_neither_its_parameters_nor_the_users_own_entries():
    assert settings_of({**MUON, "lr": torch.tensor(0.5), "params": [1], "initial_lr": 7}) == {**MUON, "lr": 0.5}
    assert settings_of({**ADAMW, "params": [1], "foreach": True}) == ADAMW
    assert settings_of({**ADAMW, "maximize": True, "fused": True}) == {**ADAMW, "maximize": True}


def updated(group: dict[str, Any], master: float, momentum: float, gradient: float) -> tuple[float, float]:
    """(master, momentum) of a 1 x 1 matrix after an update."""
    tensors = [torch.tensor([[[value]]]) for value in (master, momentum, gradient)]
    _C.muon_update(*tensors, native_group(group, torch.device("cpu")), torch.tensor(True))
    return tensors[0].item(), tensors[1].item()


def test_a_rate_below_0_moves_nothing():
    assert updated({**MUON, "lr": -1.0}, 2.0, 0.0, 1.0)[0] == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lr": torch.tensor(0.3)},
        {"weight_decay": 0.0},
        {"momentum": 0.9},
        {"nesterov": False},
        {"ns_coefficients": [(2.0, -1.0, 0.25)]},
        {"ns_steps": 1},
        {"adjust_lr_fn": "original"},
        {"adjust_lr_fn": "match_rms_adamw"},
    ],
    ids=str,
)
def test_the_engine_updates_by_the_groups_values(changes):
    """A 1 x 1 matrix over its norm is its sign, which every step of the iteration maps to a s + b s^3 + c s^5."""
    group = {**MUON, **changes}
    momentum, gradient = -1.5, 1.0
    expected = momentum + (1 - group["momentum"]) * (gradient - momentum)
    # With nesterov and a momentum of 0.5 the update has the gradient's sign, without it the other.
    update = gradient + group["momentum"] * (expected - gradient) if group["nesterov"] else expected
    x = math.copysign(1.0, update)
    a, b, c = QUINTIC if group["ns_coefficients"] == "quintic" else group["ns_coefficients"][0]
    for _ in range(group["ns_steps"]):
        x = a * x + b * x**3 + c * x**5
    lr = float(group["lr"])
    adjusted = 0.2 * lr if group["adjust_lr_fn"] == "match_rms_adamw" else lr
    master = (1 - lr * group["weight_decay"]) * 2.0 - adjusted * x
    assert updated(group, 2.0, momentum, gradient) == pytest.approx((master, expected), rel=1e-5)
