"""Batches in CUDA graphs of the fake driver: training has the bits of launches, and graphs follow what changes.

Only an iteration by cuda_full or cuda_fused is in a graph. It takes long in the emulator, so most tests have Muon's
rule without one: a normalised momentum. The asynchronous device refuses an operator or an allocation of PyTorch in a
capture.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple
from unittest import mock

import async_device
import pytest
import torch
from checkpoints import full_state, unlike
from dmuon._running.graphs import wants_graphs
from dmuon._setup.hyperparameters import choice_of, native_group
from models import batch, loss_of, part
from pool import RankPool
from test_cuda_kernels import SHAPES, on_device, started
from test_cuda_kernels import pytestmark as of_kernels
from training import place_of

import dmuon
from dmuon import _C

pytestmark = [*of_kernels[:2], pytest.mark.xdist_group("cuda_graphs")]

CAPABILITIES = (90, 80)


def begin(mesh: Any) -> bool:
    async_device.use_cuda_kernels(CAPABILITIES[mesh.get_rank()])
    return "cuda" in _C.elementwise(torch.device("emulated"), torch.float16)


@pytest.fixture(scope="module")
def gpus():
    pool = RankPool(2, device_type="emulated")
    assert pool.run(begin, (2,)) == [True] * 2
    yield pool
    pool.close()


def group_by(products: str, group: dict[str, Any], *_: Any) -> _C.MuonGroup:
    """In place of native_group: with two steps of Newton-Schulz by these products; with none by "aten"."""
    panel_rows = 0 if products == "aten" else 128
    return _C.MuonGroup(
        **{name: float(group[name]) for name in ("lr", "weight_decay", "momentum", "eps")},
        nesterov=group["nesterov"],
        coefficients=[] if products == "aten" else [(3.4445, -4.7750, 2.0315)] * 2,
        adjust_lr_fn="original",
        ns_dtype=torch.float16,
        choices={sides: choice_of(products, "DIRECT", True, panel_rows, "cuda") for sides in SHAPES},
    )


# Learning rate, decay, momentum, factor of the loss. The third step is skipped.
STEPS = (
    (0.02, 0.1, 0.95, 1.0),
    (0.015, 0.1, 0.95, 1.0),
    (0.01, 0.2, 0.9, float("inf")),
    (0.005, 0.0, 0.85, 10.0),
    (0.03, 0.3, 0.5, 1e-3),
)


class Trained(NamedTuple):
    states: list[dict[str, Any]]  # after each step
    stats: list[dict[str, float]]
    reports: list[str]
    summary: str


def set_hyperparameters(optimizer: Any, numbers: tuple[float, ...]) -> None:
    for group in optimizer.param_groups:
        if group["algorithm"] == "muon":
            group["lr"], group["weight_decay"], group["momentum"] = numbers[:3]


def train(
    mesh: Any, iterates: bool = False, without: int | None = None, clips: bool = True, products: str = "aten"
) -> Trained:
    """Trains STEPS. In the step `without` one matrix of each shape has no gradient."""
    rank, size = place_of(mesh)
    model, optimizer = started(mesh)
    states, stats = [], []
    make_group = native_group if iterates else functools.partial(group_by, products)
    with mock.patch("dmuon._running.muon.native_group", make_group), dmuon.profile(model) as profile:
        for number, numbers in enumerate(STEPS):
            set_hyperparameters(optimizer, numbers)
            (numbers[3] * loss_of(model, part(batch(number), rank, size))).backward()
            if clips:
                dmuon.clip_grad_norm_(model, 1.0)
            if number == without:
                for parameter in [p for group in optimizer.param_groups for p in group["params"]][:2]:
                    parameter.grad = None
            with async_device.no_host_sync():
                optimizer.step()
            optimizer.zero_grad()
            states.append(full_state(model, optimizer))
            stats.append(optimizer.stats())
    graphs = optimizer._runtime.graphs
    return Trained(states, stats, [] if graphs is None else graphs.reports(), profile.summary())


def run(mesh: Any, graphs: bool, folder: Any, order: str = "random", **arguments: Any) -> Trained:
    async_device.configure(order=order, races="raise")
    with mock.patch.dict(os.environ, DMUON_CUDA_GRAPHS=str(int(graphs))):
        return on_device(mesh, train, str(folder), **arguments)


def require_equal(got: list[Trained], wanted: list[Trained]) -> None:
    for one, other in zip(got, wanted, strict=True):
        for number, (state, same) in enumerate(zip(one.states, other.states, strict=True)):
            assert unlike(state, same) == [], f"step {number}"


def counts(got: Trained, key: str) -> list[float]:
    return [stats[key] for stats in got.stats]


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("order", async_device.ORDERS)
def test_graphs_train_with_the_bits_of_launches(gpus, tmp_path, order, clips):
    launched = gpus.run(run, (2,), graphs=False, folder=tmp_path, order=order, clips=clips)
    graphs = gpus.run(run, (2,), graphs=True, folder=tmp_path, order=order, clips=clips)
    require_equal(graphs, launched)
    assert all("graphs_captured" not in one.stats[0] and "batch 0" not in one.summary for one in launched)
    assert unlike(launched[0].states[0], launched[0].states[-1])
    for one in graphs:
        batches = len(one.reports)
        assert batches > 0 and [report.split(": ", 1)[1] for report in one.reports] == ["a graph"] * batches
        assert "batch 0: a graph" in one.summary
        # The first step measures, the second captures, and nothing that changes later is in the key.
        assert counts(one, "graphs_captured") == [0, *[batches] * 4]
        assert counts(one, "graphs_launched") == [batches * number for number in range(5)]


@pytest.mark.parametrize("products", ["cuda_full", "cuda_fused"])
def test_graphs_hold_iterations_by_the_kernels_products(gpus, tmp_path, products):
    launched = gpus.run(run, (2,), graphs=False, folder=tmp_path, products=products)
    graphs = gpus.run(run, (2,), graphs=True, folder=tmp_path, products=products)
    require_equal(graphs, launched)
    # On 8.0 ATen multiplies X' X of tall matrices.
    reports = [{report.split(": ", 1)[1] for report in one.reports} for one in graphs]
    assert reports == [{"a graph"}, {"a graph", "launches: PyTorch multiplies matrices"}]
    for one in graphs:
        held = sum(report.endswith(": a graph") for report in one.reports)
        assert held > 0
        assert counts(one, "graphs_launched") == [held * number for number in range(5)]


def test_a_matrix_without_a_gradient_makes_another_graph(gpus, tmp_path):
    launched = gpus.run(run, (2,), graphs=False, folder=tmp_path, without=3)
    graphs = gpus.run(run, (2,), graphs=True, folder=tmp_path, without=3)
    require_equal(graphs, launched)
    assert any(one.stats[3]["graphs_launched"] - one.stats[2]["graphs_launched"] < len(one.reports) for one in graphs)
    assert all(counts(one, "graphs_captured")[-1] == len(one.reports) for one in graphs)  # the old ones come again


def test_batches_without_a_graph_say_why(gpus, tmp_path):
    [one, other] = gpus.run(run, (2,), graphs=True, folder=tmp_path, iterates=True)
    for got in (one, other):
        reasons = {report.split(": ", 1)[1] for report in got.reports}
        assert reasons == {"launches: PyTorch multiplies matrices"}
        assert "launches: PyTorch multiplies matrices" in got.summary
        assert got.stats[-1]["graphs_captured"] == 0
    require_equal([one, other], gpus.run(run, (2,), graphs=False, folder=tmp_path, iterates=True))


def test_the_variable_is_0_or_1():
    with (
        mock.patch.dict(os.environ, DMUON_CUDA_GRAPHS="yes"),
        pytest.raises(ValueError, match="Muon: DMUON_CUDA_GRAPHS: expected 0 or 1 in the environment, got 'yes'"),
    ):
        wants_graphs()
