"""Training programs on the asynchronous device: no race, no bit that depends on what happens when, and the weights of
one process.

Each kept program is played in one order. With ASYNC_SEEDS=n (`make test-async`) it is played in all orders, and the
random one with n seeds.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import refusal
from judge import Truth
from model import Net, make, route_of, tensor_of
from on_device import ORDERS, check_on_device, on_device
from play import Outcome, Player
from pool import RankPool
from program import Block, Micro, Options, Pass, Program, Step, from_json
from several import with_each_action, with_several_matrices
from sides import Dmuon

import dmuon

pytestmark = pytest.mark.xdist_group("async_device")  # one process has the ranks

NUM_SEEDS = int(os.environ.get("ASYNC_SEEDS", "0"))
KEPT = {path.stem: from_json(path.read_text()) for path in sorted((Path(__file__).parent / "kept").glob("*.json"))}
TRAINED = {name: program for name, program in KEPT.items() if not refusal(program)}
USUAL = Micro(Pass((0, 1, 2)))
BLOCKS = (Block(), Block("mlp"), Block("nested"))


def each_order_with(*values: Any) -> list[tuple[Any, str]]:
    """All pairs in `make test-async`; else each order once, with the values in turn."""
    pairs = [(i, j) for i in range(len(values)) for j in range(len(ORDERS))]
    return [(values[i], ORDERS[j]) for i, j in pairs if NUM_SEEDS or j % len(values) == i]


def check(pool: RankPool, program: Program, chosen: str) -> None:
    seeds = {order: NUM_SEEDS if order == "random" else 1 for order in ORDERS} if NUM_SEEDS else {chosen: 1}
    check_on_device(pool, program, [(order, seed) for order, number in seeds.items() for seed in range(number)])


@pytest.mark.parametrize("name", TRAINED)
def test_kept_programs(device_ranks, name):
    check(device_ranks, TRAINED[name], ORDERS[list(TRAINED).index(name) % len(ORDERS)])


@pytest.mark.parametrize(
    ("mesh", "order", "rule"),
    [
        *(((2, 2), order, "normuon") for order in ORDERS),
        ((4,), "compute_first", "adamuon"),
        ((4,), "side_first", "muon"),
        ((4, 1), "random", "adamuon"),
        ((2,), "side_first", "muon"),
    ],
    ids=str,
)
def test_meshes(device_ranks, mesh, order, rule):
    """Blocks under fully_shard, two micro-steps of which one is under no_sync, clipping."""
    micros = (Micro(Pass((0, 1, 2)), synced=False), USUAL)
    steps = (Step((USUAL,)), Step(micros, clips=True), Step((USUAL,), clips=True))
    check(device_ranks, Program(mesh=mesh, wrap="blocks", blocks=BLOCKS, steps=steps, rule=rule), order)


@pytest.mark.parametrize("order", ORDERS)
def test_units_that_were_sent_ahead_in_vain(device_ranks, order):
    """A pass leaves the known order while the next units are on their way; nobody awaits these before their end."""
    steps = tuple(Step((Micro(Pass(uses)),)) for uses in ((0, 1, 2), (0, 0), (0, 1, 2), (0, 0, 2), (0, 1, 2)))
    options = Options(lookahead=3, max_units_in_flight=8)
    check(device_ranks, Program(mesh=(4,), blocks=BLOCKS, steps=steps, options=options), order)


@pytest.mark.parametrize(("mesh", "division", "dtype"), [((2, 2), "by size", "fp32"), ((4,), "all", "bf16")])
def test_parameters_that_hold_several_matrices(device_ranks, mesh, division, dtype):
    check(device_ranks, with_several_matrices(mesh, division, dtype), "side_first")


@pytest.mark.parametrize(("wrap", "order"), each_order_with("none", "blocks"))
def test_everything_after_a_step_waits_for_its_update(device_ranks, wrap, order):
    check(device_ranks, with_each_action((2, 2), wrap), order)


def on_another_stream(mesh: Any, program: Program, order: str) -> tuple[Outcome, list[str]]:
    """Built on the default stream, trained on another one, evaluated and read on the default one."""
    import async_device

    async_device.reset()
    async_device.configure(order=order, seed=mesh.get_rank())
    player = Player(program, Dmuon(mesh, program, program.options, program.others))
    torch.emulated.synchronize()
    own = torch.emulated.Stream()
    with torch.emulated.stream(own):
        player.play()
    torch.emulated.current_stream().wait_stream(own)
    return player.outcome(), async_device.races()


@pytest.mark.parametrize(("wrap", "order"), each_order_with("none", "blocks"))
def test_training_on_another_stream(device_ranks, wrap, order):
    steps = (Step((USUAL,)), Step((USUAL, USUAL), clips=True), Step((USUAL,)))
    program = Program(mesh=(2, 2), wrap=wrap, blocks=BLOCKS, steps=steps)
    answers = device_ranks.run(on_another_stream, program.mesh, program=program, order=order)
    found = [race for _, races in answers for race in races]
    assert not found, f"{len(found)} races, first: {found[0]}"
    Truth(program).check_all([outcome for outcome, _ in answers])


def read_beside(mesh: Any, order: str) -> tuple[list[torch.Tensor], list[str]]:
    """A side stream reads a state after a step; then the main one zeroes gradients, which the update still reads."""
    import async_device

    async_device.reset()
    async_device.configure(order=order, seed=mesh.get_rank())
    torch.manual_seed(0)
    device = torch.device("emulated", torch.emulated.current_device())
    model = torch.nn.Sequential(*(torch.nn.Linear(24, 24, bias=False) for _ in range(3)))
    x = torch.randn(4, 24).to(device)
    model.to(device)
    dmuon.dedicate_params(model, mesh, costs="modelled", late_updates=True)
    optimizer = dmuon.Muon(model, lr=0.1)
    beside = torch.emulated.Stream()
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        with torch.emulated.stream(beside):
            for leaf in optimizer._runtime.placeholders:
                optimizer.state[leaf].get("momentum_buffer")
        optimizer.zero_grad(set_to_none=False)
    with dmuon.full_params(model):
        found = [p.detach().cpu() for p in model.parameters()]
    return found, async_device.races()


@pytest.mark.parametrize("order", ORDERS)
def test_all_streams_wait_for_a_late_update(device_ranks, order):
    answers = device_ranks.run(read_beside, (2, 2), order=order)
    races = [race for _, found in answers for race in found]
    assert not races, f"{len(races)} races, first: {races[0]}"
    expected = device_ranks.run(read_beside, (2, 2), order="issue_order")[0][0]
    assert all(torch.equal(one, other) for weights, _ in answers for one, other in zip(weights, expected, strict=True))


def forward_in_branches(model: Net, x: torch.Tensor, uses: tuple[int, ...]) -> torch.Tensor:
    """Blocks in pairs that compute with the same input: on a device at once, on a stream each, hooks and all."""
    route, x = route_of(x), model.stem(x)
    for first, second in zip(uses[::2], uses[1::2], strict=True):
        if x.is_cpu:
            x = tensor_of(model.blocks[first](x, route)) + tensor_of(model.blocks[second](x, route))
            continue
        main, beside = torch.emulated.current_stream(), torch.emulated.Stream()
        beside.wait_stream(main)
        with torch.emulated.stream(beside):
            change = tensor_of(model.blocks[first](x, route))
        x.record_stream(beside)
        x = tensor_of(model.blocks[second](x, route))
        main.wait_stream(beside)
        change.record_stream(main)
        x = change + x
    return model.head(x)


def in_branches(mesh: Any, program: Program, order: str) -> tuple[Outcome, list[str]]:
    usual, Net.forward = Net.forward, forward_in_branches
    try:
        return on_device(mesh, program, order, 0)
    finally:
        Net.forward = usual


@pytest.mark.parametrize(("reshard", "order"), each_order_with(True, False))
def test_units_on_two_streams(device_ranks, monkeypatch, reshard, order):
    uses = Pass((1, 1, 0, 1, 2, 0))
    micro = Micro(uses, evaluation="no_grad", evaluated=uses)
    steps = (Step((micro,)), Step((micro, micro), clips=True), Step((micro,)))
    options = Options(lookahead=1, reshard_after_forward=reshard)
    program = Program(mesh=(2, 2), blocks=BLOCKS, steps=steps, options=options)
    answers = device_ranks.run(in_branches, program.mesh, program=program, order=order)
    found = [race for _, races in answers for race in races]
    assert not found, f"{len(found)} races, first: {found[0]}"
    monkeypatch.setattr(Net, "forward", forward_in_branches)
    Truth(program).check_all([outcome for outcome, _ in answers])


def in_a_bound_world(mesh: Any) -> tuple[bool, set[Any]]:
    """Whether the world is bound to its device afterwards, and to what it was while dmuon made groups."""
    world = torch.distributed.distributed_c10d._get_default_group()
    own = torch.device("emulated", torch.emulated.current_device())
    while_made, make_group = [], torch.distributed.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        while_made.append(world.bound_device_id)
        return make_group(*args, **kwargs)

    world.bound_device_id, torch.distributed.new_group = own, new_group
    try:
        dmuon.dedicate_params(make(Program()).to(own), mesh, costs="modelled", timeout=datetime.timedelta(seconds=77))
        return world.bound_device_id == own, set(while_made)
    finally:
        world.bound_device_id, torch.distributed.new_group = None, make_group


def test_groups_are_no_parts_of_a_world_that_is_bound_to_a_device(device_ranks):
    """NCCL would split it, and wait for ranks that are not of the mesh."""
    assert device_ranks.run(in_a_bound_world, (2,)) == [(True, {None})] * 2
