"""dmuon.whole_states: trainers that save on the first rank alone write whole tensors, and every rank loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from checkpoints import MODELS, started, train
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from training import AHEAD, dedicate, place_of, weights_of

import dmuon


def made(mesh: Any, kind: str) -> tuple[nn.Module, dmuon.Muon]:
    if kind != "unsharded":
        return started(mesh, MODELS[kind](), tied=kind == "tied")
    model = MODELS["gpt"]()
    dedicate(model, mesh, AHEAD)
    return model, dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)


def sent(opt: dmuon.Muon) -> float:
    return opt.stats()["bytes_sent_intra"] + opt.stats()["bytes_sent_inter"]


def went_on(mesh: Any, kind: str, path: str) -> list[str]:
    """What differs after two steps from a file of the first rank, and after two steps without a break."""
    model, opt = made(mesh, kind)
    ema = dmuon.Ema(model, 0.5)
    train(mesh, model, opt, range(2))
    ema.update()
    wrapper = nn.ModuleDict({"policy": model})
    methods = model.state_dict, opt.state_dict, ema.state_dict
    with dmuon.whole_states(model, opt, ema):
        before = sent(opt)
        saved = {"model": wrapper.state_dict(), "optimizer": opt.state_dict(), "ema": ema.state_dict()}
        assert sent(opt) == before
        if place_of(mesh)[0] == 0:
            tensors = [leaf for leaf in tree_leaves(saved) if isinstance(leaf, torch.Tensor)]
            assert all(t.device.type == "cpu" and not isinstance(t, DTensor) for t in tensors)
            for name, part in model.named_modules(prefix="policy"):  # on this rank alone
                below = {k: v for k, v in saved["model"].items() if k.startswith(f"{name}.")}
                found = part.state_dict(prefix=f"{name}.")
                assert found.keys() == below.keys() and all(below[key] is value for key, value in found.items())
            torch.save(saved, path)
        else:
            assert saved == {"model": {}, "optimizer": {}, "ema": {}}
    assert (model.state_dict, opt.state_dict, ema.state_dict) == methods
    train(mesh, model, opt, range(2, 4))
    ema.update()
    expected = weights_of(model), ema.state_dict()["weights"]

    whole = torch.load(path)
    model, opt = made(mesh, kind)
    ema = dmuon.Ema(model, 0.1)
    weights = {name.removeprefix("policy."): value for name, value in whole["model"].items()}
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    opt.load_state_dict(whole["optimizer"])
    ema.load_state_dict(whole["ema"])
    train(mesh, model, opt, range(2, 4))
    ema.update()
    unlike = [name for name, value in weights_of(model).items() if not torch.equal(value, expected[0][name])]
    for name, value in ema.state_dict()["weights"].items():
        parts = (t.to_local() if isinstance(t, DTensor) else t for t in (value, expected[1][name]))
        unlike += [] if torch.equal(*parts) else [f"mean of {name}"]
    return unlike


@pytest.mark.parametrize(
    ("mesh", "kind"), [((2, 2), "gpt"), ((3,), "bf16"), ((4,), "unsharded"), ((2, 2), "heads"), ((1,), "gpt")]
)
def test_training_goes_on_bit_by_bit_from_the_first_ranks_file(ranks, tmp_path, mesh, kind):
    path = Path(tmp_path) / "whole.pt"
    assert ranks.run(went_on, mesh, kind=kind, path=str(path)) == [[]] * torch.Size(mesh).numel()


def loaded_from_the_first_rank(mesh: Any, path: str) -> list[str]:
    model, _ = started(mesh, MODELS["gpt"]())
    ema = dmuon.Ema(model)
    states = [model.state_dict(), ema.state_dict()]
    if place_of(mesh)[0] == 0:
        torch.save(states, path)
    ema.state_dict()  # the others wait
    messages = []
    for target, state in zip([model, ema], torch.load(path, weights_only=False), strict=True):
        with pytest.raises(ValueError) as error:
            target.load_state_dict(state)
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("mesh", [(2, 2), (4,)])
def test_shards_of_the_first_rank_alone_are_refused(ranks, tmp_path, mesh):
    for of_model, of_ema in ranks.run(loaded_from_the_first_rank, mesh, path=str(tmp_path / "shards.pt")):
        for message in (of_model, of_ema):
            assert "this rank's, got part 0" in message and "dmuon.whole_states" in message


def test_copies_are_of_the_moment():
    model = nn.Linear(2, 2)
    with dmuon.whole_states(model):
        with dmuon.whole_states(model):
            pass
        assert "state_dict" in vars(model)
        weights = model.state_dict()
        inside = nn.Sequential(model).state_dict()
    assert weights._metadata == model.state_dict()._metadata
    assert inside._metadata == nn.Sequential(model).state_dict()._metadata
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(weights["weight"] + 1, model.weight)


def checkpointed(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(checkpointed, compiled), (compiled, checkpointed), (checkpointed, nn.Sequential), (compiled, nn.Sequential)],
)
def test_modules_inside_of_wrappers_have_their_states(outer, inner):
    model = nn.Sequential(nn.Linear(2, 2), outer(inner(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2)))))
    expected = {path: part.state_dict() for path, part in model.named_modules()}
    with dmuon.whole_states(model):
        for path, part in model.named_modules():
            found = part.state_dict()
            assert found.keys() == expected[path].keys()
            assert all(torch.equal(value, expected[path][key]) for key, value in found.items())


class Renaming(nn.Sequential):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {key.replace("0.", "first."): value for key, value in super().state_dict(*args, **kwargs).items()}


def test_a_module_whose_keys_the_model_renames_has_no_state():
    model = Renaming(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    with dmuon.whole_states(model):
        assert model[1].state_dict() == {} and len(model[2].state_dict()) == 2
        with pytest.raises(ValueError, match="whole_states: the model's state has no keys of its module '0'"):
            model[0].state_dict()


def test_a_module_around_a_part_saves_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    around = nn.ModuleDict({"part": model[1]})
    expected = around.state_dict()
    with dmuon.whole_states(model):
        found = around.state_dict()
    assert list(found) == list(expected) == ["part.weight", "part.bias"]
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_what_has_no_state_is_refused_and_an_error_inside_ends_it():
    with pytest.raises(ValueError, match=r"whole_states: objects\[1\]: expected one with a state_dict\(\), got 'a'"):
        dmuon.whole_states(nn.Linear(1, 1), "a").__enter__()
    model = nn.Linear(2, 2)
    with pytest.raises(KeyError), dmuon.whole_states(model):
        raise KeyError
    assert "state_dict" not in vars(model)
