"""Hooks that split, merge, rename, cast or transpose weights of a state dict see what they see under stock FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dsd
import torch.nn as nn
from checkpoints import loss, sharded, started, train, unlike
from models import Gpt, make_gpt
from pool import make_mesh
from test_state_dict import differences
from torch.distributed.tensor import DTensor, Replicate, Shard
from training import AHEAD, dedicate, place_of

import dmuon

State = dict[str, Any]


def split(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
    """Saves Q, K and V apart, as torchtitan's fused projection does."""
    weight = state.pop(f"{prefix}qkv.weight")
    if isinstance(weight, DTensor):
        weight = weight.redistribute(placements=[Replicate()] * weight.device_mesh.ndim)
    for name, rows in zip("qkv", weight.chunk(3), strict=True):
        state[f"{prefix}w{name}.weight"] = rows.clone()


def merge(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
    if f"{prefix}wq.weight" in state:
        state[f"{prefix}qkv.weight"] = torch.cat([state.pop(f"{prefix}w{name}.weight") for name in "qkv"])


def rename(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")
    state[f"{prefix}offset"] = state.pop(f"{prefix}bias")


def rename_back(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
    state[f"{prefix}bias"] = state.pop(f"{prefix}offset")


def cast(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
    state[f"{prefix}own"] = state[f"{prefix}own"].bfloat16()


def cast_back(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].float()


def transpose(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].T.clone()


def transpose_back(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].T


def of_another_format(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}transformer.{key.removeprefix(prefix)}"] = state.pop(key) * 2


def from_another_format(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}transformer.")]:
        state[prefix + key.removeprefix(f"{prefix}transformer.")] = state.pop(key) / 2


class Own(nn.Linear):
    """Its own methods name its weight anew."""

    def _save_to_state_dict(self, destination: State, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}own"] = destination.pop(f"{prefix}weight")

    def _load_from_state_dict(self, state_dict: State, prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}own")
        super()._load_from_state_dict(state_dict, prefix, *args)


HOOKS: dict[str, tuple[Callable[[Any], nn.Module], Callable[..., None], Callable[..., None]]] = {
    "fused": (lambda block: block, split, merge),
    "renamed": (lambda block: block.up, rename, rename_back),
    "cast": (lambda block: block.down, cast, cast_back),
    "transposed": (lambda block: block.out, transpose, transpose_back),
}


def hooked(model: Any, names: list[str]) -> None:
    for name in names:
        if name == "model":
            model.register_state_dict_post_hook(of_another_format)
            model.register_load_state_dict_pre_hook(from_another_format)
        elif name != "own":
            place, save, load = HOOKS[name]
            for block in model.blocks:
                place(block).register_state_dict_post_hook(save)
                place(block).register_load_state_dict_pre_hook(load)


def gpt(seed: int, names: list[str]) -> Gpt:
    model = make_gpt(seed, depth=2)
    for block in model.blocks if {"cast", "own"} & set(names) else ():
        weight = block.down.weight
        block.down = Own(41, 24, bias=False)
        block.down.weight = weight
    return model


def under_dmuon(mesh: Any, names: list[str], order: str, late: bool) -> tuple[Any, dmuon.Muon]:
    """`order`: that of dedicate_params and fully_shard, or no fully_shard. `late`: hooks come after Muon."""
    model = gpt(0, names)
    if not late:
        hooked(model, names)
    if order != "after":
        dedicate(model, mesh, AHEAD)
    if order != "alone":
        sharded(mesh, model, False)
    if order == "after":
        dedicate(model, None, AHEAD)
    opt = dmuon.Muon(model, lr=0.02, ns_dtype=torch.float32)
    if late:
        hooked(model, names)
    return model, opt


def whole(state: State) -> State:
    return {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in state.items()}


def stock(mesh: Any, names: list[str], seed: int, order: str) -> Any:
    model = gpt(seed, names)
    hooked(model, names)
    return model if order == "alone" else sharded(mesh, model, False)


def compared(mesh: Any, names: list[str], order: str, late: bool) -> list[str]:
    ours, opt = under_dmuon(mesh, names, order, late)
    theirs = stock(mesh, names, 0, order)
    form = whole if order == "alone" else lambda state: state

    def compare(when: str) -> list[str]:
        found = differences(form(ours.state_dict()), theirs.state_dict())
        if not late:
            found += differences(form(ours.blocks[1].state_dict()), theirs.blocks[1].state_dict())
        if names == ["transposed"]:  # torch knows no key that is no parameter's
            full = dsd.StateDictOptions(full_state_dict=True, cpu_offload=True)
            found += differences(
                dsd.get_model_state_dict(ours, options=full), dsd.get_model_state_dict(theirs, options=full)
            )
        return [f"{when}: {what}" for what in found]

    found = compare("first")
    other = stock(mesh, names, 5, order)
    for model in (ours, theirs):
        model.load_state_dict(other.state_dict())
    found += compare("loaded")
    with torch.no_grad():
        losses = [float(loss(mesh, model, 7)) for model in (ours, theirs)]
    found += [] if losses[0] == pytest.approx(losses[1], rel=1e-5) else [f"losses {losses}"]
    third = stock(mesh, names, 6, order)
    if not late:
        for model in (ours, theirs):
            model.blocks[0].load_state_dict(third.blocks[0].state_dict())
        found += compare("a block loaded")
    train(mesh, ours, opt, range(1))
    before = whole(ours.state_dict())
    ours.load_state_dict(ours.state_dict())  # what was saved, with the forms that it has
    found += [f"again: {key}" for key in unlike(whole(ours.state_dict()), before)]
    return found


ALL = ["fused", "renamed", "cast", "transposed"]


@pytest.mark.parametrize(
    ("mesh", "names", "order", "late"),
    [
        ((2, 2), ALL, "before", False),
        ((2, 2), [*ALL, "model"], "after", False),
        ((2, 2), ALL, "alone", False),
        ((2, 2), ALL, "before", True),
        ((2,), [*ALL, "model"], "before", False),
        ((2,), ALL, "after", True),
        ((2,), ALL, "alone", True),
        ((3,), ["transposed"], "before", False),
        ((2, 2), ["transposed"], "after", True),
        ((1,), ALL, "before", False),
    ],
    ids=str,
)
def test_hooks_save_and_load_as_under_stock_fsdp2(ranks, mesh, names, order, late):
    found = ranks.run(compared, mesh, names=names, order=order, late=late)
    assert found == [[]] * torch.Size(mesh).numel()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("names", [[*ALL, "model"], ["own"]], ids=str)
def test_hooks_save_and_load_in_one_process(names, late):
    assert compared(None, names, "alone", late) == []


def failures(mesh: Any, how: str) -> tuple[str, list[str]]:
    """(the error, matrices that have changed nevertheless, or "stale")."""
    model, opt = under_dmuon(mesh, ["fused"], "before", False)
    other = stock(mesh, ["fused"], 5, "before").state_dict()
    before = whole(model.state_dict())
    key, first = "blocks.1.wk.weight", place_of(mesh)[0] == 1
    if how == "shape":
        other[key] = other[key][1:]
    elif how == "missing":
        del other["head.weight"]
    elif how == "missing fused":
        for name in "qkv":
            del other[f"blocks.0.w{name}.weight"]
    elif how == "raises on a rank":
        model.blocks[1].norm.register_load_state_dict_pre_hook(_fail if first else lambda *_: None)
    elif how == "ranks differ" and first:
        del other["blocks.0.wq.weight"], other["blocks.0.wk.weight"], other["blocks.0.wv.weight"]
    elif how == "bias":
        other["blocks.1.up.bias"] = other["blocks.1.up.bias"].full_tensor()[1:]
        model.blocks[1].register_load_state_dict_pre_hook(lambda *_: None)
    elif how == "while saving":
        handle = model.norm.register_state_dict_post_hook(_fail)
    message = ""
    try:
        model.state_dict() if how == "while saving" else model.load_state_dict(other)
    except (ValueError, RuntimeError) as error:
        message = f"{type(error).__name__}: {error}"
    if how == "while saving":
        handle.remove()
        train(mesh, model, opt, range(1))
        part, full = (whole(of.state_dict()) for of in (model.blocks[0], model))
        return message, [key for key in part if not torch.equal(part[key], full[f"blocks.0.{key}"])]
    return message, [
        key for key in unlike(whole(model.state_dict()), before) if "norm" not in key and "bias" not in key
    ]


def _fail(*_: Any) -> None:
    raise RuntimeError("mine")


@pytest.mark.parametrize(
    ("how", "words", "unchanged"),
    [
        ("shape", ["ValueError", "'blocks.1.qkv.weight': expected shape (72, 24), got (71, 24)", "No matrix"], True),
        ("missing", ["ValueError", "no values for 'head.weight'", "Nothing has been loaded"], True),
        ("missing fused", ["RuntimeError", "Missing key(s)", "blocks.0.qkv.weight"], False),
        ("raises on a rank", ["Error: ", "mine"], True),
        ("ranks differ", ["ValueError", "ranks differ", "blocks.0.qkv.weight"], True),
        ("bias", ["ValueError", "blocks.1.up.bias", "No matrix has been loaded"], True),
        ("while saving", ["RuntimeError: mine"], True),
    ],
)
def test_an_error_in_a_load_with_hooks_leaves_matrices_unchanged_on_all_ranks(ranks, how, words, unchanged):
    for message, changed in ranks.run(failures, (2, 2), how=how):
        assert [word for word in words if word not in message] == [], message
        others = [".embedding.weight", ".head.weight"]  # AdamW's, which torch has copied before
        assert not unchanged or [key for key in changed if key not in others] == []


def in_a_wrapper(mesh: Any) -> list[str]:
    """A module around the model saves and loads it, and so does a load after one that has failed there."""
    ours, theirs = under_dmuon(mesh, ALL, "before", False)[0], stock(mesh, ALL, 0, "before")
    wrapped = [nn.ModuleDict({"inner": model}) for model in (ours, theirs)]
    found = differences(wrapped[0].state_dict(), wrapped[1].state_dict())
    other = stock(mesh, ALL, 5, "before")
    handle = ours.norm.register_load_state_dict_pre_hook(_fail)
    try:
        wrapped[0].load_state_dict(nn.ModuleDict({"inner": other}).state_dict())
    except RuntimeError:
        handle.remove()
    for model in (ours, theirs):
        model.blocks[1].load_state_dict(other.blocks[1].state_dict())
    found += differences(ours.blocks[1].state_dict(), theirs.blocks[1].state_dict())
    for model in wrapped:
        model.load_state_dict(nn.ModuleDict({"inner": other}).state_dict())
    return found + differences(wrapped[0].state_dict(), wrapped[1].state_dict())


def test_a_module_around_the_model_saves_and_loads_it(ranks):
    assert ranks.run(in_a_wrapper, (2, 2)) == [[]] * 4


def with_other_placements(mesh: Any, dtype: torch.dtype) -> list[str]:
    """DTensors of the same mesh, however they are cut, as FSDP2 takes them."""
    model, _ = started(mesh, make_gpt(depth=2).to(dtype))
    other = sharded(mesh, make_gpt(5, depth=2).to(dtype), False)
    expected = whole(other.state_dict())
    given = other.state_dict()
    given["blocks.0.up.weight"] = given["blocks.0.up.weight"].redistribute(placements=[Replicate()] * mesh.ndim)
    by_columns = [Replicate()] * (mesh.ndim - 1) + [Shard(1)]
    given["blocks.1.out.weight"] = given["blocks.1.out.weight"].redistribute(placements=by_columns)
    model.load_state_dict(given)
    return unlike(whole(model.state_dict()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtensors_that_are_cut_otherwise_load_exactly(ranks, dtype):
    assert ranks.run(with_other_placements, (2, 2), dtype=dtype) == [[]] * 4


def of_a_file_with_a_former_head(mesh: Any, names: list[str]) -> list[str]:
    """Rank 0 alone has read the file, which has a tensor that is no more and lacks one that is new."""
    full = dsd.StateDictOptions(full_state_dict=True)
    file = dsd.get_model_state_dict(stock(mesh, names, 5, "before"), options=full)
    file["former_head.weight"] = torch.ones(3)
    file.pop("norm.weight")
    options = dsd.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    models = [under_dmuon(mesh, names, "before", False)[0], stock(mesh, names, 0, "before")]
    found = [
        dsd.set_model_state_dict(model, copy.deepcopy(file) if place_of(mesh)[0] == 0 else {}, options=options)
        for model in models
    ]
    return differences(models[0].state_dict(), models[1].state_dict()) + ([] if found[0] == found[1] else found)


@pytest.mark.parametrize("names", [[], ["transposed"]], ids=str)  # hooks may change values later
def test_a_key_that_rank_0_alone_has_and_nobody_uses_is_ignored_as_under_stock_fsdp2(ranks, names):
    assert ranks.run(of_a_file_with_a_former_head, (2, 2), names=names) == [[]] * 4


def on_another_mesh(mesh: Any) -> str:
    model, _ = under_dmuon(mesh, [], "before", False)
    given = stock(make_mesh((4,), mesh.device_type), [], 5, "before").state_dict()
    try:
        model.load_state_dict(given)
    except ValueError as error:
        return str(error)
    return ""


def test_dtensors_of_another_mesh_are_refused(ranks):
    for message in ranks.run(on_another_mesh, (2, 2)):
        assert "'embedding.weight': expected a DTensor with" in message and "Nothing has been loaded" in message


class Tied(nn.Module):
    """A matrix with names inside and outside of a module whose hook changes values, in either order."""

    def __init__(self, outside_last: bool, in_root: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        hooked = nn.Sequential(nn.Linear(8, 8, bias=False))
        beside = nn.Linear(8, 8, bias=False)
        self.first, self.second = (hooked, beside) if outside_last else (beside, hooked)
        beside.weight = hooked[0].weight
        if in_root:
            self.weight = hooked[0].weight
        hooked.register_load_state_dict_pre_hook(triple)


def triple(module: nn.Module, state: State, prefix: str, *_: Any) -> None:
    state[f"{prefix}0.weight"] = state[f"{prefix}0.weight"] * 3


@pytest.mark.parametrize("in_root", [False, True])
@pytest.mark.parametrize("outside_last", [False, True])
def test_of_a_tied_matrix_the_last_name_counts_as_in_torch(outside_last, in_root):
    ours, theirs = Tied(outside_last, in_root), Tied(outside_last, in_root)
    dmuon.dedicate_params(ours, select=lambda *_: True)
    dmuon.Muon(ours)
    given = {key: torch.randn_like(value) for key, value in theirs.state_dict().items()}
    for model in (ours, theirs):
        model.load_state_dict(dict(given))
    assert differences(ours.state_dict(), theirs.state_dict()) == []


def test_a_checkpoint_of_a_batch_norm_without_its_counter_loads():
    ours, theirs = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(2))
    dmuon.dedicate_params(ours)
    dmuon.Muon(ours)
    old = {key: value for key, value in theirs.state_dict().items() if "num_batches_tracked" not in key}
    ours.load_state_dict(old)
    assert differences(ours.state_dict(), theirs.state_dict()) == []
