"""dedicate_params on a model that is under fully_shard already, as trainers hand it over, is as if it came before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from checkpoints import MODELS, loss, sharded
from default_device import own_random_numbers
from logged import logged
from models import batch, loss_of, make_gpt
from pool import make_mesh
from refusals import REFUSED, Refusals, expect_refusal
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from training import AHEAD, dedicate, shard

import dmuon

MP = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def whole(values: Any) -> torch.Tensor:
    tensor: torch.Tensor = values.full_tensor() if hasattr(values, "full_tensor") else values
    return tensor


def trained(mesh: Any, name: str, after: bool) -> dict[str, torch.Tensor]:
    model = MODELS[name]()
    if not after:
        dedicate(model, mesh, AHEAD)
    sharded(mesh, model, name == "tied")
    if after:
        dedicate(model, None, AHEAD)  # with the mesh of fully_shard
    opt = dmuon.Muon(model, lr=0.02)
    for step in range(2):
        loss(mesh, model, step).backward()
        opt.step()
        opt.zero_grad()
        if step == 0:  # goes on from a checkpoint of its own
            model.load_state_dict(model.state_dict())
            weights, state = get_state_dict(model, opt)
            set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state)
    return {name: whole(value) for name, value in model.state_dict().items()}


def differences(mesh: Any, models: list[str]) -> list[str]:
    found = []
    for name in models:
        before, after = (trained(mesh, name, late) for late in (False, True))
        found += [f"{name}: keys"] if list(before) != list(after) else []
        found += [f"{name}: {key}" for key in before if not torch.equal(before[key], after[key])]
    return found


# A shape of mesh decides where matrices and shards lie, a model what they are: thin ones leave ranks without a shard.
@pytest.mark.parametrize(
    ("mesh", "models"),
    [
        ((2, 2), list(MODELS)),
        ((1, 4), ["tied", "bf16 experts"]),
        ((4, 1), ["frozen", "bf16"]),
        ((3,), ["thin", "experts"]),
        ((1,), ["heads"]),
    ],
    ids=str,
)
def test_training_is_the_same_bit_by_bit(ranks, mesh, models):
    assert ranks.run(differences, mesh, models=models) == [[]] * torch.Size(mesh).numel()


def in_bf16(mesh: Any, after: bool) -> torch.Tensor:
    model = make_gpt(depth=2)
    if not after:
        dedicate(model, mesh, AHEAD, mp_policy=MP)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=MP)
    fully_shard(
        model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    )
    if after:
        dedicate(model, None, AHEAD)
    dmuon.Muon(model)
    return loss_of(model, batch(0)).detach()


def test_the_policy_is_that_of_most_modules(ranks):
    late, early = (ranks.run(in_bf16, (2, 2), after=after) for after in (True, False))
    assert [float(loss) for loss in late] == [float(loss) for loss in early]


def fill(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())


@own_random_numbers()
def from_meta(mesh: Any) -> list[str]:
    """Whether matrices leave fully_shard before they have values, or with them: always those of one process."""
    reference = make_gpt(depth=2)
    fill(reference)
    found = []
    for has_values in (False, True):
        with torch.device("meta"):
            model = make_gpt(depth=2)
        shard(model, mesh)
        if not has_values:
            dedicate(model, None, AHEAD)
        model.to_empty(device=mesh.device_type)
        if has_values:
            for parameter, values in zip(model.parameters(), reference.parameters(), strict=True):
                parameter.data.copy_(distribute_tensor(values.data, parameter.device_mesh, parameter.placements))
            dedicate(model, None, AHEAD)
        else:
            fill(model)
        dmuon.Muon(model)
        weights = model.state_dict()
        found += [name for name, p in reference.named_parameters() if not torch.equal(whole(weights[name]), p.data)]
    return found


@pytest.mark.parametrize("mesh", [(2, 2), (3,)])
def test_a_model_on_the_meta_device_can_be_sharded_first(ranks, mesh):
    assert ranks.run(from_meta, mesh) == [[]] * torch.Size(mesh).numel()


def with_a_converted_weight(mesh: Any) -> tuple[str, bool]:
    """Returns who updates a matrix whose shards are tensors without memory of their own, and if it stays as it was."""
    model = make_gpt(depth=2)
    up = model.blocks[1].up
    up.weight = nn.Parameter(TwoTensor(up.weight.detach().clone(), up.weight.detach().clone()))
    shard(model, mesh)
    before = up.weight.to_local().a.clone()
    (row,) = (row for row in dmuon.dedicate_params(model) if row.name == "blocks.1.up.weight")
    opt = dmuon.Muon(model)
    loss_of(model, batch(0)).backward()
    opt.step()
    return f"{row.algorithm}: {row.why}", torch.equal(before, up.weight.to_local().a)


def test_a_converted_weight_is_left_to_adamw(ranks):
    assert ranks.run(with_a_converted_weight, (2,)) == [("adamw: a TwoTensor", False)] * 2


refused = Refusals()


@refused("a forward has run under fully_shard", "dedicate_params before the first")
def after_a_forward(mesh: Any) -> None:
    model = make_gpt(depth=1)
    shard(model, mesh)
    model(batch(0))
    dmuon.dedicate_params(model, mesh)


@refused("'blocks.0.qkv.weight' is sharded by", "over ranks ((0, 1, 2, 3),)", "over ((0, 1), (2, 3))")
def on_another_mesh(mesh: Any) -> None:
    model = make_gpt(depth=1)
    shard(model, make_mesh((4,), mesh.device_type))
    dmuon.dedicate_params(model, mesh)


@refused("'blocks.0.qkv.weight' is sharded by", "Shard(dim=1)", "After dedicate_params fully_shard may have any")
def along_its_columns(mesh: Any) -> None:
    model = make_gpt(depth=1)
    shard(model, mesh, shard_placement_fn=lambda p: Shard(1) if p.shape == (72, 24) else None)
    dmuon.dedicate_params(model, mesh)


@refused(
    "'qkv.weight' is a DTensor that no fully_shard of this model manages",
    "tensor parallelism over other ranks than the mesh",
)
def parallel_in_its_tensors(mesh: Any) -> None:
    model = make_gpt(depth=1).blocks[0]
    weight = distribute_tensor(model.qkv.weight.data, mesh, [Replicate(), Shard(0)])
    model.qkv.weight = nn.Parameter(weight)
    dmuon.dedicate_params(model, mesh)


@pytest.mark.parametrize(REFUSED, refused)
def test_what_cannot_leave_its_shards_is_refused(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)


def of_before(mesh: Any, argument: str) -> list[str]:
    """Errors, or else warnings, of parameters taken from the model before fully_shard."""
    model = make_gpt(depth=1)
    former = dict(model.named_parameters())
    shard(model, mesh)
    dedicate(model, None, AHEAD)
    opt = dmuon.Muon(model, lr=0.02) if argument == "add_param_group" else None
    with logged() as messages:
        for name in ("blocks.0.up.weight", "blocks.0.up.bias"):
            try:
                if opt is not None:
                    opt.add_param_group({"params": former[name]})
                else:
                    dmuon.Muon(model, **{argument: [{"params": former[name]}]})
            except ValueError as error:
                messages.append(str(error))
        if opt is not None:
            loss_of(model, batch(0)).backward()
            opt.step()
    return messages


@pytest.mark.parametrize("argument", ["add_param_group", "muon_groups", "adamw_groups"])
def test_a_parameter_of_before_fully_shard_is_named(ranks, argument):
    messages, *others = ranks.run(of_before, (2, 2), argument=argument)
    for name, message in zip(["blocks.0.up.weight", "blocks.0.up.bias"], messages, strict=True):
        assert f"'{name}'" in message and "before fully_shard" in message
    if "fully_shard, which has replaced it" in messages[0]:
        assert others == [messages] * 3
