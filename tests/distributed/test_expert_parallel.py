"""Stacks of experts that are divided over the ranks of a node are trained as on one process that has all of them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from cut import Cut, trained_alone
from divided import IN_COLUMNS, Block, divide, loss_of, make_model, matrices_of, node_of, select
from mixture import Blocks
from models import weights_of_plain
from refusals import REFUSED, Refusals, expect_refusal
from scenario import assert_equal_to_reference
from test_divide_factor import tell
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from training import AHEAD, LR, NO_COPY, ON_DEMAND, WEIGHT_DECAY, dedicate, place_of, shard, weights_of

import dmuon

STEPS = 4
MOST = 0.5  # of the gradients' norm: less than any here


@pytest.fixture(scope="module")
def reference() -> list[dict[str, torch.Tensor]]:
    return trained_alone(make_model(), matrices_of, loss_of, STEPS, MOST)


def train(mesh: DeviceMesh, schedule: dict[str, Any], held: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Also saves and loads everything, in the middle, and says what the plan, the table and `verify` say."""
    model = make_model()
    divide(model, node_of(mesh))
    dedicate(model, mesh, schedule, select=select, **options)
    shard(model, mesh)
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    before = dmuon.verify(model, optimizer)
    seen = set()  # whether a module's experts are a DTensor
    model.blocks[0].experts.register_forward_pre_hook(lambda module, _: seen.add(isinstance(module.down, DTensor)))
    rank, size = place_of(mesh)
    for step in range(STEPS):
        for part in range(2 if held else 1):
            with dmuon.no_sync(model) if held and part == 0 else nullcontext():
                (loss_of(model, step, rank, size) / (2 if held else 1)).backward()
        dmuon.clip_grad_norm_(model, MOST)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            saved = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
            loss_of(model, 100, rank, size).backward()
            optimizer.step()  # which what was saved undoes
            optimizer.zero_grad()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    streamed = {name: weight.clone() for name, weight in dmuon.iter_full_params(model)}
    owners = {row.name: row.owner for row in dmuon.routing_table(model)}
    after = dmuon.verify(model, optimizer)
    return {
        "weights": weights_of(model),
        "saved": whole,
        "streamed": streamed,
        "ok": before.ok and after.ok and seen == {False},
        "owners": owners,
    }


@pytest.mark.parametrize(
    ("mesh", "schedule", "held", "options"),
    [
        ((4,), AHEAD, False, {}),
        ((2, 2), AHEAD, True, {}),
        ((2, 2), ON_DEMAND, False, {"strategy": "round_robin"}),
        ((2, 2), NO_COPY, True, {"sync_from_rank0": True}),
        ((4, 1), AHEAD, True, {}),  # one rank has all experts
    ],
)
def test_divided_stacks_are_trained_as_on_one_process(ranks, reference, mesh, schedule, held, options):
    for got in ranks.run(train, mesh, schedule=schedule, held=held, options=options):
        assert_equal_to_reference(*reference, got["weights"])
        for name, weight in got["weights"].items():
            assert torch.equal(got["saved"][name], weight), name
            assert torch.equal(got["streamed"][name], weight), name
        assert got["ok"]
        assert (
            got["owners"][IN_COLUMNS] in range(4)
            if mesh == (4, 1)
            else sorted(got["owners"][IN_COLUMNS]) == [0, 1, 2, 3]
        )


def from_first_node(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    model = make_model()
    divide(model, node_of(mesh))
    if mesh.get_rank() >= 2:
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).add_(mesh.get_rank())
    dedicate(model, mesh, AHEAD, select=select, sync_from_rank0=True)
    dmuon.Muon(model)
    return weights_of(model)


def test_owners_take_the_values_of_the_first_rank_that_has_the_experts(ranks):
    expected = weights_of_plain(make_model())
    for got in ranks.run(from_first_node, (2, 2)):
        for name, weight in expected.items():
            assert torch.equal(got[name], weight), name


def edit(model: Blocks) -> None:
    with torch.no_grad():
        model.blocks[0].experts.gate_up[1::2] *= -1
        model.blocks[2].experts.down[:, 2] *= -1


def of_a_tied_stack(mesh: DeviceMesh) -> dict[str, Any]:
    """After an edit and two steps on sums of gradients: weights, their average, and the norms of clipping."""
    model = make_model()
    divide(model, node_of(mesh))
    model.blocks[2].experts.down = model.blocks[1].experts.down
    dedicate(model, mesh, AHEAD, select=select, gradient_divide_factor=1.0)
    shard(model, mesh)
    tell(model, 1.0)
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    ema = dmuon.Ema(model, decay=0.75)
    with dmuon.full_params(model, writeback=True):
        edit(model)
    edited, norms = weights_of(model), []
    rank, size = place_of(mesh)
    for step in range(2):
        (loss_of(model, step, rank, size) / size).backward()
        norms.append(float(dmuon.clip_grad_norm_(model, MOST)))
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    with ema.applied():
        averaged = weights_of(model)
    return {"edited": edited, "weights": weights_of(model), "averaged": averaged, "norms": norms}


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_a_divided_stack_of_two_modules_is_edited_summed_and_averaged_as_on_one_process(ranks, mesh):
    model = make_model()
    model.blocks[2].experts.down = model.blocks[1].experts.down
    initial = weights_of_plain(model)
    edit(model)
    edited, averaged, norms = weights_of_plain(model), initial, []
    cut = Cut(model, matrices_of)
    for step in range(2):
        loss_of(model, step, 0, 1).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MOST)))
        cut.step()
        averaged = {name: 0.75 * averaged[name] + 0.25 * weight for name, weight in weights_of_plain(model).items()}
    for got in ranks.run(of_a_tied_stack, mesh):
        for name, weight in edited.items():
            assert torch.equal(got["edited"][name], weight), name
        assert_equal_to_reference(edited, weights_of_plain(model), got["weights"])
        assert_equal_to_reference(initial, averaged, got["averaged"])
        assert got["norms"] == pytest.approx(norms, rel=1e-4)


def from_undivided(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """What one step makes of weights and momentum that were saved where no stack was divided."""
    trained = make_model()
    dedicate(trained, mesh, AHEAD, select=select)
    shard(trained, mesh)
    first = dmuon.Muon(trained, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    loss_of(trained, 0, *place_of(mesh)).backward()
    first.step()
    saved = copy.deepcopy((dict(trained.state_dict()), first.state_dict()))
    model = make_model()
    divide(model, node_of(mesh))
    dedicate(model, mesh, AHEAD, select=select)
    shard(model, mesh)
    optimizer = dmuon.Muon(model, lr=LR, weight_decay=WEIGHT_DECAY, ns_dtype=torch.float32)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    loss_of(model, 1, *place_of(mesh)).backward()
    optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_a_checkpoint_of_whole_stacks_goes_on_divided(ranks, mesh):
    model = make_model()
    initial = weights_of_plain(model)
    cut = Cut(model, matrices_of)
    for step in range(2):
        loss_of(model, step, 0, 1).backward()
        cut.step()
    for got in ranks.run(from_undivided, mesh):
        assert_equal_to_reference(initial, weights_of_plain(model), got)


def norms_in_16_bits(mesh: DeviceMesh, dtype: torch.dtype, divided: bool) -> tuple[dict[str, float], bool]:
    """The norm of each stack's gradient, and what `verify` says."""
    model = make_model()
    if divided:
        divide(model, node_of(mesh))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    dedicate(model, mesh, AHEAD, select=select, mp_policy=policy)
    shard(model, mesh, mp_policy=policy)
    optimizer = dmuon.Muon(model)
    ok = dmuon.verify(model, optimizer).ok
    loss_of(model, 0, *place_of(mesh)).backward()
    return {name: float(p.grad.norm()) for name, p in model.named_parameters() if "experts" in name}, ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_gradients_in_16_bits_are_divided_by_the_ranks_once(ranks, mesh, dtype):
    expected, _ = ranks.run(norms_in_16_bits, mesh, dtype=dtype, divided=False)[0]
    for got, ok in ranks.run(norms_in_16_bits, mesh, dtype=dtype, divided=True):
        assert got == pytest.approx(expected, rel=0.02)
        assert ok


def with_a_frozen_stack(mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    model = make_model()
    divide(model, node_of(mesh))
    for block in model.blocks:
        block.experts.down.requires_grad_(False)
    dedicate(model, mesh, AHEAD, select=select)
    optimizer = dmuon.Muon(model, lr=LR)
    loss_of(model, 0, *place_of(mesh)).backward()
    optimizer.step()
    return {name: p.to_local() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def test_a_frozen_stack_stays_as_it_was_divided(ranks):
    whole = weights_of_plain(make_model())
    for rank, got in enumerate(ranks.run(with_a_frozen_stack, (2, 2))):
        assert len(got) == 3
        for name, weight in got.items():
            assert torch.equal(weight.cpu(), whole[name].chunk(2)[rank % 2]), name


refused = Refusals()


@refused("'blocks.0.experts.gate_up' is divided by experts over ranks", "Expected: over the ranks of a node")
def over_nodes(mesh: DeviceMesh) -> None:
    model = make_model()
    divide(model, mesh["replicate"])
    dedicate(model, mesh, AHEAD, select=select)


@refused("'blocks.0.experts.down' is a DTensor", "and AdamW's, so that nobody would average its gradients")
def by_adamw(mesh: DeviceMesh) -> None:
    model = make_model()
    divide(model, node_of(mesh))
    dedicate(model, mesh, AHEAD, select=lambda name, *_: False if name.endswith("down") else None)


@refused("has 8 experts with views of [1] matrices", "Expected: equally many experts on each rank, and one view")
def as_one_matrix(mesh: DeviceMesh) -> None:
    model = make_model()
    divide(model, node_of(mesh))
    dedicate(model, mesh, AHEAD, select=lambda name, *_: dmuon.View(1, 160, 6) if name.endswith("gate_up") else None)


@refused("'blocks.1.proj.bias' is a DTensor", "nobody would average its gradients")
def a_bias_by_ranks(mesh: DeviceMesh) -> None:
    model = make_model()
    bias = model.blocks[1].proj.bias.detach().chunk(2)[0]
    model.blocks[1].proj.bias = nn.Parameter(DTensor.from_local(bias, node_of(mesh), [Shard(0)], run_check=False))
    dedicate(model, mesh, AHEAD, select=select)


@refused("'blocks.2.proj.weight' is a DTensor", "tensor parallelism over other ranks than the mesh's")
def a_matrix_by_rows(mesh: DeviceMesh) -> None:
    model = make_model()
    layer = model.blocks[2].proj
    rows = layer.weight.detach().chunk(4)[0]
    layer.weight = nn.Parameter(DTensor.from_local(rows, mesh, [Replicate(), Shard(0)], run_check=False))
    dedicate(model, mesh, AHEAD, select=select)


@refused("and on the meta device. Expected: values")
def on_meta(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = Blocks(Block)
    divide(model, node_of(mesh))
    dedicate(model, mesh, AHEAD, select=select)


@refused("1 of 21 parameters have other values", "'blocks.1.experts.down of column 1' (on ranks 3)")
def replicas_that_differ(mesh: DeviceMesh) -> None:
    model = make_model()
    divide(model, node_of(mesh))
    if mesh.get_rank() == 3:
        model.blocks[1].experts.down.data.to_local()[0, 0, 0] += 1
    dedicate(model, mesh, AHEAD, select=select)
    dmuon.Muon(model)


@pytest.mark.parametrize(REFUSED, refused)
def test_what_no_owner_could_own_is_refused(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
