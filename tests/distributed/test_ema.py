"""dmuon.Ema is torch's exponential mean of the weights, wherever they lie, and saves and loads like them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from checkpoints import MODELS, loss, started, train
from interrupts import interrupt
from models import batch, loss_of
from pool import make_mesh
from refusals import REFUSED, Refusals, expect_refusal, rank_of, ready
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import place_of

import dmuon

DECAY = 0.7


def whole(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in values.items()
    }


def masters(model: nn.Module, opt: Any) -> dict[str, torch.Tensor]:
    """The weights in fp32, from state dicts."""
    names = [name for name, _ in model.named_parameters()]
    numbered = [p for group in opt.param_groups for p in group["params"]]
    number = {id(p): index for index, p in enumerate(numbered)}
    state = opt.state_dict()["state"]
    weights = whole(model.state_dict())
    for name, parameter in model.named_parameters():
        kept = state.get(number.get(id(parameter)), {})
        weights[name] = whole(kept)["master"] if "master" in kept else weights[name].float()
    return {name: weights[name] for name in names}


def reference(snapshots: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By PyTorch: of modules that hold the snapshots one after the other."""

    def holder(values: dict[str, torch.Tensor]) -> nn.Module:
        return nn.ParameterList([nn.Parameter(value) for value in values.values()])

    mean = AveragedModel(holder(snapshots[0]), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for snapshot in snapshots:  # the first one is taken as it is
        mean.update_parameters(holder(snapshot))
    return dict(zip(snapshots[0], (p.detach() for p in mean.module), strict=True))


def differences(mesh: Any, models: list[str]) -> list[str]:
    found = []
    for name in models:
        model, opt = started(mesh, MODELS[name](), tied=name == "tied")
        ema = dmuon.Ema(model, DECAY)
        snapshots = [masters(model, opt)]
        for step in range(2):
            train(mesh, model, opt, range(step, step + 1))
            ema.update()
            snapshots.append(masters(model, opt))
        expected = reference(snapshots)
        trainable = {n for n, p in model.named_parameters() if p.requires_grad}
        got = whole(ema.state_dict()["weights"])
        found += [f"{name}: names {got.keys() ^ trainable}"] if got.keys() != trainable else []
        found += [f"{name}: {k}" for k, v in got.items() if not torch.allclose(v, expected[k], rtol=1e-6, atol=1e-7)]

        before = [snapshots[-1], whole(model.state_dict()), float(loss(mesh, model, 0).detach())]
        with ema.applied(), torch.no_grad():
            values = [float(loss(mesh, model, 0))]
            held = model.state_dict()  # after which FSDP2 gathers anew
            shown = whole(held)
            values.append(float(loss(mesh, model, 0)))
        at_once = float(loss(mesh, model, 0).detach())
        found += [f"{name}: held {k}" for k, v in whole(held).items() if not torch.equal(shown[k], v)]
        found += [f"{name}: shown {k}" for k in got if not torch.equal(shown[k], got[k].to(shown[k].dtype))]
        if values[0] == before[2] or values[0] != values[1]:
            found.append(f"{name}: computes with the weights")
        after = [masters(model, opt), whole(model.state_dict()), float(loss(mesh, model, 0).detach())]
        found += [f"{name}: {k} is not as before" for k in before[0] if not torch.equal(before[0][k], after[0][k])]
        found += [f"{name}: {k} is not as before" for k in before[1] if not torch.equal(before[1][k], after[1][k])]
        found += [f"{name}: loss"] if not before[2] == at_once == after[2] else []
    return found


# A shape of mesh decides where matrices and shards lie, a model what they are: thin ones leave ranks without a shard.
@pytest.mark.parametrize(
    ("mesh", "models"),
    [
        ((2, 2), list(MODELS)),
        ((1, 4), ["thin", "bf16 experts"]),
        ((4, 1), ["gpt", "bf16"]),
        ((1, 3), ["thin", "heads"]),
        ((1,), ["frozen", "bf16 experts"]),
    ],
    ids=str,
)
def test_the_mean_is_pytorchs_and_the_weights_come_back(ranks, mesh, models):
    assert ranks.run(differences, mesh, models=models) == [[]] * torch.Size(mesh).numel()


def after_an_evaluation(mesh: Any) -> list[str]:
    """After a forward alone FSDP2 leaves what it has gathered in its places."""
    model, opt = started(mesh, MODELS["gpt"]())
    with torch.no_grad():
        loss(mesh, model, 0)
    ema = dmuon.Ema(model, DECAY)
    snapshots = [masters(model, opt)]
    train(mesh, model, opt, range(1))
    ema.update()
    snapshots.append(masters(model, opt))
    expected = reference(snapshots)
    got = whole(ema.state_dict()["weights"])
    return [name for name, value in got.items() if not torch.allclose(value, expected[name], rtol=1e-6, atol=1e-7)]


def test_an_evaluation_before_changes_nothing(ranks):
    assert ranks.run(after_an_evaluation, (2, 2)) == [[]] * 4


def of_parts_that_are_frozen(mesh: Any) -> list[str]:
    """A unit and AdamW's parameters in it are frozen before the mean is made, and train later."""
    model, opt = started(mesh, MODELS["gpt"]())
    model.blocks[1].requires_grad_(False)
    ema = dmuon.Ema(model, DECAY)
    snapshots = [masters(model, opt)]
    for step in range(4):
        model.blocks[1].requires_grad_(step >= 2)
        train(mesh, model, opt, range(step, step + 1))
        ema.update()
        snapshots.append(masters(model, opt))
    expected, got = reference(snapshots), whole(ema.state_dict()["weights"])
    if got.keys() != {name for name, _ in model.named_parameters()}:
        return ["names"]
    return [name for name, value in got.items() if not torch.allclose(value, expected[name], rtol=1e-6, atol=1e-7)]


@pytest.mark.parametrize("mesh", [(2, 2), (1,)])
def test_parts_that_are_frozen_for_a_while_have_a_mean(ranks, mesh):
    assert ranks.run(of_parts_that_are_frozen, mesh) == [[]] * torch.Size(mesh).numel()


NUM_PLACES = 150  # more than there are


def interrupted(mesh: Any, on: str, every: int) -> list[str]:
    """At places on the way into `applied`, or out of it. There ranks are interrupted at different places."""
    model, opt = started(mesh, MODELS["gpt"]())
    ema = dmuon.Ema(model, DECAY)
    train(mesh, model, opt, range(1))
    ema.update()
    kept = ema.state_dict()["weights"]

    def values() -> dict[str, torch.Tensor]:
        means = whole(ema.state_dict()["weights"])
        return {**masters(model, opt), **{f"mean of {name}": value for name, value in means.items()}}

    before, found, hits = values(), [], []
    for number in range(0, NUM_PLACES, every):
        with_mean = ema.applied()
        if on == "entry":
            hits.append(interrupt(with_mean.__enter__, number))
        else:
            with_mean.__enter__()
        if on == "exit" or not hits[-1]:
            place = (number + 40 * rank_of(mesh)) % NUM_PLACES if on == "exit" else NUM_PLACES
            hits.append(interrupt(lambda: with_mean.__exit__(None, None, None), place))  # noqa: B023
        loss(mesh, model, 0).backward()  # no call is refused
        opt.zero_grad()
        after = values()
        found += [f"{name} after {number}" for name, value in before.items() if not torch.equal(value, after[name])]
    train(mesh, model, opt, range(1, 2))
    ema.update()
    found += [f"kept {n}" for n, value in whole(kept).items() if not torch.equal(value, before[f"mean of {n}"])]
    return [*found, *([] if 40 / every < sum(hits) < len(hits) else [f"{sum(hits)} of {len(hits)} interrupts"])]


@pytest.mark.parametrize("on", ["entry", "exit"])
@pytest.mark.parametrize(("mesh", "every"), [((2, 2), 7), ((1,), 1)])
def test_an_interrupt_leaves_weights_and_means_as_they_are(ranks, mesh, on, every):
    assert ranks.run(interrupted, mesh, on=on, every=every) == [[]] * torch.Size(mesh).numel()


def saved(mesh: Any, path: str) -> dict[str, torch.Tensor]:
    model, opt = started(mesh, MODELS["gpt"]())
    ema = dmuon.Ema(model, DECAY)
    train(mesh, model, opt, range(2))
    ema.update()
    dcp.save(ema.state_dict(), checkpoint_id=path)
    return whole(ema.state_dict()["weights"])


def loaded(mesh: Any, path: str) -> tuple[dict[str, torch.Tensor], float, int]:
    model, _ = started(mesh, MODELS["gpt"]())
    ema = dmuon.Ema(model, 0.1)
    state = copy.deepcopy(ema.state_dict())
    dcp.load(state, checkpoint_id=path, no_dist=True)  # other ranks of the world are not there
    ema.load_state_dict(state)
    return whole(ema.state_dict()["weights"]), ema.decay, ema.num_updates


@pytest.mark.parametrize("mesh", [(2, 2), (1, 3), (1,)])
def test_it_is_saved_and_loaded_on_another_mesh(ranks, tmp_path, mesh):
    expected = ranks.run(saved, (1, 4), path=str(tmp_path))[0]
    for weights, decay, num_updates in ranks.run(loaded, mesh, path=str(tmp_path)):
        assert (decay, num_updates) == (DECAY, 1)
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def memory(mesh: Any) -> list[float]:
    model, opt = started(mesh, MODELS["gpt"]())
    found = [opt.stats()["current_bytes"]]
    ema = dmuon.Ema(model)
    found.append(opt.stats()["current_bytes"])
    sent = opt.stats()["bytes_sent_intra"] + opt.stats()["bytes_sent_inter"]
    ema.update()
    found.append(opt.stats()["bytes_sent_intra"] + opt.stats()["bytes_sent_inter"] - sent)
    del ema
    return [*found, opt.stats()["current_bytes"], sum(p.numel() for p in opt._runtime.placeholders)]


def test_owners_alone_hold_it_nothing_is_sent_and_it_goes(ranks):
    results = ranks.run(memory, (2, 2))
    assert sum(with_it - before for before, with_it, *_ in results) == 4 * results[0][-1]
    for before, _, sent, after, _ in results:
        assert sent == 0
        assert after == before


refused = Refusals()


@refused("Ema: decay: expected a number from 0 to 1, got 1.5", decay=1.5)
@refused("Ema: decay: expected a number from 0 to 1, got '1'", decay="1")
@refused("Ema: decay: expected a number from 0 to 1, got True", decay=True)
def no_decay(mesh: Any, decay: Any) -> None:
    dmuon.Ema(ready(mesh)[0], decay)


@refused("Ema: ranks differ", "decay 0.5")
def decays_that_differ(mesh: Any) -> None:
    dmuon.Ema(ready(mesh)[0], 0.5 if place_of(mesh)[0] else 0.25)


@refused("Ema.applied: step() inside it", what="step")
@refused("Ema.applied: a backward inside it", what="backward")
@refused("Ema.applied: a backward inside it", what="forward and backward")
@refused("Ema.applied: a backward inside it", what="graph")
@refused("Ema.applied: opt.state_dict() inside it", what="save")
@refused("Ema.applied: opt.load_state_dict() inside it", what="load")
@refused("Ema.applied: load_state_dict() inside it", what="load the model")
@refused("Ema.applied: load_state_dict() inside it", what="load a part")
@refused("Ema.applied: Ema.update() inside it", what="update")
@refused("Ema.applied: Ema.applied() inside it", what="nested")
@refused("Ema.applied: full_params(writeback=True) inside it", what="write")
def while_applied(mesh: Any, what: str) -> None:
    model, opt = ready(mesh)
    ema = dmuon.Ema(model)
    weights, state = model.state_dict(), opt.state_dict()
    before = whole(weights)
    loss_of(model, batch(1)).backward()
    outside = loss_of(model, batch(2))
    try:
        with ema.applied():
            {
                "step": opt.step,
                "backward": outside.backward,
                "forward and backward": lambda: loss_of(model, batch(2)).backward(),
                "graph": lambda: outside.backward(create_graph=True),
                "save": opt.state_dict,
                "load": lambda: opt.load_state_dict(state),
                "load the model": lambda: model.load_state_dict(weights),
                "load a part": lambda: model.head.load_state_dict({"weight": weights["head.weight"]}),
                "update": ema.update,
                "nested": lambda: ema.applied().__enter__(),
                "write": lambda: dmuon.full_params(model, writeback=True).__enter__(),
            }[what]()
    finally:
        assert all(torch.equal(value, before[name]) for name, value in whole(model.state_dict()).items())


@refused("Ema.load_state_dict: weights:", "missing ['blocks.1.up.weight']", how="missing")
@refused("Ema.load_state_dict: 'blocks.1.up.weight': expected shape (41, 24), got (2, 2)", how="shape")
@refused("Ema.load_state_dict: 'embedding.weight': expected a DTensor with (Replicate(), Shard(dim=0))", how="mesh")
@refused("Ema.load_state_dict: ranks differ", "'blocks.0.up.weight' whole", how="forms")
@refused("Ema.load_state_dict: num_updates: expected an int from 0, got 'many'", how="number")
@refused("Ema.load_state_dict: num_updates: expected an int from 0, got -4", how="negative")
@refused("Ema.load_state_dict: weights: expected a dict by name, got None", how="no weights")
@refused("Ema.load_state_dict: state_dict: expected", "got ['model']", how="foreign")
def what_does_not_fit(mesh: Any, how: str) -> None:
    ema = dmuon.Ema(ready(mesh)[0])
    state = ema.state_dict()
    before = whole(state["weights"])
    match how:
        case "mesh":
            table = make_mesh((4,), mesh.device_type)
            state["weights"]["embedding.weight"] = distribute_tensor(torch.zeros(29, 24), table, [Shard(0)])
        case "forms":
            of_file = state["weights"]["blocks.0.up.weight"].full_tensor()
            if place_of(mesh)[0] == 0:
                state["weights"]["blocks.0.up.weight"] = of_file
        case "number":
            state["num_updates"] = "many"
        case "negative":
            state["num_updates"] = -4
        case "no weights":
            state["weights"] = None
        case "missing":
            del state["weights"]["blocks.1.up.weight"]
        case "shape":
            state["weights"]["blocks.1.up.weight"] = torch.zeros(2, 2)
        case "foreign":
            state = {"model": {}}
    try:
        ema.load_state_dict(state)
    finally:
        assert all(torch.equal(value, before[name]) for name, value in whole(ema.state_dict()["weights"]).items())


@pytest.mark.parametrize(REFUSED, refused)
def test_what_would_spoil_the_mean_is_refused(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
