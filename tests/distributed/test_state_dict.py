"""state_dict of a model and of Muon beside those of the same model under stock FSDP2; what does not fit is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dsd
import torch.nn as nn
from checkpoints import MODELS, dicts_of, full_state, loss, sharded, started, train, trained_by_torch, unlike
from models import Gpt, make_gpt
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from training import AHEAD, NO_COPY, place_of

import dmuon


def differences(ours: dict[str, Any], stock: dict[str, Any], values: bool = True) -> list[str]:
    """What of a state dict is not as stock FSDP2 has it."""
    found = [] if list(ours) == list(stock) else [f"keys {list(ours)} for {list(stock)}"]
    for key in ours.keys() & stock.keys():
        a, b = ours[key], stock[key]
        for what in ("device_mesh", "placements", "shape", "dtype", "device"):
            if getattr(a, what, None) != getattr(b, what, None):
                found.append(f"{key}: {what} {getattr(a, what, None)} for {getattr(b, what, None)}")
        if isinstance(b, DTensor):
            if a.stride() != b.stride():
                found.append(f"{key}: stride")
            a, b = a.to_local(), b.to_local()
        if a.shape != b.shape or (values and not torch.equal(a, b)):
            found.append(f"{key}: values")
    return found


def of_model(mesh: Any, model: str, schedule: dict[str, Any]) -> list[str]:
    stock = sharded(mesh, MODELS[model](), model == "tied")
    ours = started(mesh, MODELS[model](), schedule, model == "tied")[0]
    found = differences(ours.state_dict(), stock.state_dict())
    found += differences(ours.blocks[1].state_dict(), stock.blocks[1].state_dict())
    found += differences(dsd.get_model_state_dict(ours), dsd.get_model_state_dict(stock))
    for offload in (False, True):
        full = dsd.StateDictOptions(full_state_dict=True, cpu_offload=offload)
        found += differences(
            dsd.get_model_state_dict(ours, options=full), dsd.get_model_state_dict(stock, options=full)
        )
    return found


def of_models(mesh: Any, models: list[str], schedule: dict[str, Any]) -> list[str]:
    return [f"{model}: {what}" for model in models for what in of_model(mesh, model, schedule)]


# A shape of mesh decides where matrices and shards lie, a model what they are: thin ones leave ranks without a shard.
@pytest.mark.parametrize(
    ("mesh", "models"),
    [
        ((2, 2), list(MODELS)),
        ((4,), ["thin", "tied", "bf16 experts"]),
        ((1, 4), ["thin", "heads"]),
        ((4, 1), ["frozen", "bf16"]),
        ((1, 3), ["thin", "experts"]),
        ((1,), ["tied", "bf16 experts"]),
    ],
    ids=str,
)
def test_a_models_state_dict_is_as_stock_fsdp2_gives_it(ranks, mesh, models):
    assert ranks.run(of_models, mesh, models=models, schedule=AHEAD) == [[]] * torch.Size(mesh).numel()


def of_optimizer(mesh: Any) -> list[str]:
    model, opts = trained_by_torch(mesh, 1)
    stock = dsd.get_optimizer_state_dict(model, opts)
    model, opt = started(mesh, make_gpt(depth=2))
    found = []
    for steps in (range(0), range(1)):  # one that has made no step can be loaded into
        train(mesh, model, opt, steps)
        ours = dsd.get_optimizer_state_dict(model, opt)
        found += [] if ours["state"].keys() == stock["state"].keys() else ["parameters"]
        for name, state in stock["state"].items():
            found += [f"{name}: {what}" for what in differences(ours["state"][name], state, values=False)]
    return found


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (4, 1), (1, 3), (1,)])
def test_an_optimizers_state_dict_is_as_torchs_under_fsdp2(ranks, mesh):
    assert ranks.run(of_optimizer, mesh) == [[]] * torch.Size(mesh).numel()


def spoiled(mesh: Any, how: str, saved: dict[str, Any]) -> None:
    """Makes a whole state of all ranks one that does not fit."""
    weights, state, name = saved["model"], saved["optimizer"]["state"], "blocks.1.up.weight"
    groups = saved["optimizer"]["param_groups"]
    match how:
        case "no matrix":
            del weights[name]
        case "no matrix on rank 1":
            weights.pop(name) if place_of(mesh)[0] == 1 else None
        case "no bias":
            del weights["blocks.1.up.bias"]
        case "another shape":
            weights[name] = weights[name][:-1]
        case "another shape of a bias":
            weights["blocks.1.up.bias"] = weights["blocks.1.up.bias"][:-1]
        case "a key too many":
            weights["blocks.1.gate.weight"] = torch.zeros(3, 3)
        case "a number":
            weights["blocks.1.up.bias"] = 1.0
        case "another depth":
            for key in [key for key in weights if key.startswith("blocks.1.")]:
                weights[key.replace("1", "2")] = weights.pop(key)
            weights["embedding.weight"] = torch.zeros(3, 3)
        case "foreign":
            weights.clear()
            weights["transformer.h.0.weight"] = torch.zeros(3, 3)
        case "no momentum":
            state[name]["exp_avg"] = state[name].pop("momentum_buffer")
        case "no state on rank 1":
            state.pop(name) if place_of(mesh)[0] == 1 else None
        case "momentum of another shape":
            state[name]["momentum_buffer"] = state[name]["momentum_buffer"].T
        case "AdamW's of another shape":
            state["head.weight"]["exp_avg"] = state["head.weight"]["exp_avg"][:-1]
        case "AdamW's cut otherwise":
            moment = state["head.weight"]["exp_avg"]
            replicated = [Replicate()] * mesh.ndim
            state["head.weight"]["exp_avg"] = DTensor.from_local(moment, mesh, replicated, run_check=False)
        case "AdamW's incomplete":
            del state["head.weight"]["exp_avg_sq"]
        case "Adam":
            groups[1]["decoupled_weight_decay"] = False
        case "SGD":
            groups[0] = {"params": groups[0]["params"], "lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False}
        case "no group":
            groups.pop()
        case "another algorithm":
            groups[0] = {"params": groups[0]["params"], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
        case "a bad hyperparameter":
            groups[0]["momentum"] = 2.0
        case "groups differ":
            groups[0]["lr"] = 0.5 + place_of(mesh)[0]


def unfit(mesh: Any, how: str, of_model: bool) -> tuple[str, list[str]]:
    """(the error, what has changed nevertheless)."""
    model, opt = started(mesh, make_gpt(depth=2))
    train(mesh, model, opt, range(1))
    before, saved = full_state(model, opt), full_state(*another(mesh))
    spoiled(mesh, how, saved)
    message = ""
    try:
        if of_model:
            cut = {name: as_sharded(mesh, value) for name, value in saved["model"].items()}
            model.load_state_dict(cut)
        else:
            alone = how == "momentum whole on rank 1" and place_of(mesh)[0] == 1
            whole = (("blocks.1.up.weight", "momentum_buffer"),) if alone else ()
            opt.load_state_dict(numbered(saved["optimizer"], model, opt, mesh, whole))
    except ValueError as error:
        message = str(error)
    return message, unlike(full_state(model, opt), before)


def another(mesh: Any) -> tuple[nn.Module, Any]:
    model, opt = started(mesh, make_gpt(seed=5, depth=2))
    train(mesh, model, opt, range(1))
    return model, opt


def as_sharded(mesh: Any, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def numbered(
    state: dict[str, Any], model: nn.Module, opt: Any, mesh: Any, whole: tuple[tuple[str, str], ...] = ()
) -> dict[str, Any]:
    """Whole tensors by name as the shards by number that load_state_dict takes."""
    numbers = {id(p): number for number, p in enumerate(p for group in opt.param_groups for p in group["params"])}
    of_name = {name: numbers[id(p)] for name, p in model.named_parameters()}
    return {
        "state": {
            of_name[name]: {
                key: as_sharded(mesh, value) if value.ndim and (name, key) not in whole else value
                for key, value in of.items()
            }
            for name, of in state["state"].items()
        },
        "param_groups": [
            {**group, "params": [of_name[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no matrix", ["no values for 'blocks.1.up.weight'", "Nothing has been loaded"]),
        ("no matrix on rank 1", ["blocks.1.up.weight", "on rank 1"]),
        ("no bias", ["no values for 'blocks.1.up.bias'"]),
        ("another shape", ["'blocks.1.up.weight': expected shape (41, 24), got (40, 24)"]),
        ("another shape of a bias", ["'blocks.1.up.bias': expected shape (41,), got (40,)"]),
        ("a key too many", ["no place for 'blocks.1.gate.weight'"]),
        ("a number", ["'blocks.1.up.bias': expected a tensor, got float"]),
        (
            "another depth",
            [
                "no values for 'blocks.1.norm.weight', 'blocks.1.norm.bias'",
                "and 2 more; no place for 'blocks.2.norm.weight', 'blocks.2.norm.bias'",
            ],
        ),
        ("foreign", ["no values for 'embedding.weight', 'blocks.0.norm.weight'", "more"]),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_has_changed(ranks, how, words):
    for rank, (message, changed) in enumerate(ranks.run(unfit, (2, 2), how=how, of_model=True)):
        expected = [word for word in words if word != "on rank 1" or rank != 1]
        assert [word for word in expected if word not in message] == [], message
        assert changed == []


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no momentum", ["'blocks.1.up.weight': expected 'momentum_buffer'", "Without its entry in 'state'"]),
        ("no state on rank 1", ["ranks differ", "'blocks.1.up.weight' NoneType"]),
        ("momentum of another shape", ["'momentum_buffer' of 'blocks.1.up.weight': expected shape (41, 24)"]),
        ("AdamW's of another shape", ["'exp_avg' of 'head.weight': expected shape (29, 24), got (28, 24)"]),
        ("AdamW's cut otherwise", ["'exp_avg' of 'head.weight': expected a DTensor with (Replicate(), Shard(dim=0))"]),
        ("AdamW's incomplete", ["state of 'head.weight': expected one with ['exp_avg', 'exp_avg_sq', 'step']"]),
        ("Adam", ["param_groups[1]: expected a group of algorithm 'adamw', got 'adam'"]),
        ("SGD", ["param_groups[0]: expected a group of algorithm 'muon', got 'another'", "dampening"]),
        ("momentum whole on rank 1", ["ranks differ", "momentum_buffer (whole)"]),
        ("no group", ["param_groups: expected groups of"]),
        ("another algorithm", ["param_groups[0]: expected a group of algorithm 'muon', got 'adamw'"]),
        ("a bad hyperparameter", ["momentum: expected a number in [0, 1), got 2"]),
        ("groups differ", ["ranks differ", "0.5"]),
    ],
)
def test_optimizer_state_that_does_not_fit_is_refused_and_nothing_has_changed(ranks, how, words):
    for message, changed in ranks.run(unfit, (2, 2), how=how, of_model=False):
        assert [word for word in words if word not in message] == [], message
        assert changed == []


def odd_uses(mesh: Any) -> dict[str, Any]:
    """What people do with state dicts beside saving them; what each comes to."""
    found: dict[str, Any] = {}
    model, opt = started(mesh, make_gpt(depth=2), NO_COPY)
    other, _ = another(mesh)
    train(mesh, model, opt, range(2))

    def error_of(action: Callable[[], Any]) -> str:
        before = full_state(model, opt)
        try:
            action()
        except (ValueError, RuntimeError) as error:
            return f"{error} {unlike(full_state(model, opt), before) or 'unchanged'}"
        return ""

    @torch.no_grad()
    def copy_all() -> None:
        model.blocks[0].up.weight.copy_(other.blocks[0].up.weight)

    found["copy"] = error_of(copy_all)
    found["placeholders"] = error_of(lambda: model.blocks[0].load_state_dict(dict(other.blocks[0].named_parameters())))
    found["assign"] = error_of(lambda: model.load_state_dict(other.state_dict(), assign=True))
    found["prefix"] = {type(v) for k, v in model.blocks.state_dict(prefix="blocks.").items() if "up.weight" in k}
    model.blocks[1].up.weight.requires_grad_(False)
    before = full_state(model, opt)
    saved = copy.deepcopy(dicts_of(model, opt))
    dsd.set_state_dict(model, opt, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    found["frozen"] = unlike(full_state(model, opt), before)
    model.blocks[1].up.weight.requires_grad_(True)

    def renamed(opt: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {"state": state["old"], "param_groups": state["param_groups"]}

    handle = opt.register_load_state_dict_pre_hook(renamed)
    state = opt.state_dict()
    opt.load_state_dict({"old": state["state"], "param_groups": state["param_groups"]})
    handle.remove()
    # Weights alone: the next forward computes with them, though nothing of the optimizer was loaded.
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        found["loss"] = [float(loss(mesh, either, 7)) for either in (model, other)]
    return found


@pytest.mark.parametrize("mesh", [(2, 2), (4,)])
def test_odd_uses(ranks, mesh):
    for found in ranks.run(odd_uses, mesh):
        assert "on 'blocks.0.up.weight'" in found["copy"] and "unchanged" in found["copy"]
        assert "placeholder of another model" in found["placeholders"]
        # Of a part of a model torch has copied what came first.
        assert found["placeholders"].endswith("['.model.blocks.0.norm.bias', '.model.blocks.0.norm.weight']")
        assert "assign: expected False" in found["assign"] and "unchanged" in found["assign"]
        assert "load_state_dict without assign, after to_empty" in found["assign"]
        assert found["prefix"] == {DTensor}
        assert found["frozen"] == [".optimizer.state.blocks.1.up.weight.momentum_buffer"]  # torch drops it
        assert found["loss"][0] == found["loss"][1]


def kept_over_a_step(mesh: Any) -> list[list[str]]:
    """What a dict that was taken before a step has of the weights after it; and a dict that is taken anew."""
    model, opt = started(mesh, make_gpt(depth=2))
    kept = model.state_dict()
    before = {key: value.full_tensor() for key, value in kept.items()}
    train(mesh, model, opt, range(1))
    anew = {key: value.full_tensor() for key, value in model.state_dict().items()}
    with dmuon.full_params(model):
        now = {
            name: p.detach() if not isinstance(p, DTensor) else p.full_tensor() for name, p in model.named_parameters()
        }
    return [
        [key for key in kept if torch.equal(kept[key].full_tensor(), before[key])],
        [key for key in kept if not torch.equal(anew[key], now[key])],
    ]


def test_a_dict_that_is_kept_has_the_matrices_of_its_time_and_a_new_one_has_all(ranks):
    matrices = [name for name, p in make_gpt(depth=2).named_parameters() if "blocks" in name and p.ndim == 2]
    assert ranks.run(kept_over_a_step, (2, 2)) == [[matrices, []]] * 4


def raises_while_loading(mesh: Any) -> list[str]:
    """A hook of the user's raises on one rank; the others have loaded, and nobody waits for ever."""
    model, _ = started(mesh, make_gpt(depth=2))
    weights = another(mesh)[0].state_dict()

    def fail(*_: Any) -> None:
        if place_of(mesh)[0] == 1:
            raise RuntimeError("mine")

    handle = model.norm.register_load_state_dict_post_hook(fail)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        assert str(error) == "mine"
    handle.remove()
    model.load_state_dict(weights)
    return unlike(model.state_dict(), weights)


def test_a_rank_that_raises_while_loading_keeps_nobody_waiting(ranks):
    assert ranks.run(raises_while_loading, (2, 2)) == [[]] * 4


def test_a_models_own_state_dict_keeps_its_signature():
    class Own(Gpt):
        def state_dict(self, only: str = "", **kwargs: Any) -> Any:
            return {key: value for key, value in super().state_dict(**kwargs).items() if only in key}

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
            return super().load_state_dict(state_dict, strict=strict)

    model, _ = started(None, Own(depth=1))
    weights = make_gpt(seed=4, depth=1).state_dict()
    model.load_state_dict(weights)
    assert unlike(model.state_dict(), weights) == []
    assert list(model.state_dict("norm", prefix="a.")) == [f"a.{key}" for key in weights if "norm" in key]


def test_modules_without_matrices_are_copied_and_pickled_without_the_model():
    model, _ = started(None, make_gpt(depth=1))
    weights = make_gpt(seed=4, depth=1).state_dict()
    pickled = pickle.loads(pickle.dumps(model.head))
    copied = copy.deepcopy(model.blocks[0].norm)
    for made, name in ((pickled, "head"), (copied, "blocks.0.norm")):
        mine = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        made.load_state_dict(mine)
        assert unlike(made.state_dict(), mine) == []
    assert model.head.weight.ne(weights["head.weight"]).any()
