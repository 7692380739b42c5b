"""What comes into a model after Muon and is in no group is named in one warning; whatever is trained is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from logged import logged
from models import batch, loss_of, make_gpt
from refusals import rank_of, ready
from training import AHEAD, KEPT, dedicate, shard

import dmuon


class Adapted(nn.Module):
    """A layer and the product of two small matrices, as LoRA has it."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def nothing(model: Any, opt: dmuon.Muon) -> None:
    pass


def another_model(model: Any, opt: dmuon.Muon) -> None:
    """Other modules of the process do not concern this one."""
    make_gpt(depth=1)


def adapter(model: Any, opt: dmuon.Muon) -> None:
    model.blocks[1].down = Adapted(model.blocks[1].down)


def adapter_and_other_models(model: Any, opt: dmuon.Muon) -> None:
    """Later steps walk through the model too."""
    adapter(model, opt)
    opt.register_step_post_hook(lambda *_: another_model(model, opt))


def adapter_in_a_group(model: Any, opt: dmuon.Muon) -> None:
    adapter(model, opt)
    opt.add_param_group({"params": [p for name, p in model.blocks[1].down.named_parameters() if "layer" not in name]})


def frozen_adapter(model: Any, opt: dmuon.Muon) -> None:
    adapter(model, opt)
    model.blocks[1].down.down.requires_grad_(False)
    model.blocks[1].down.up.requires_grad_(False)


def replaced(model: Any, opt: dmuon.Muon) -> None:
    """The output head, by one of another task."""
    model.head = nn.Linear(model.head.in_features, model.head.out_features, bias=False)


def replaced_parameter(model: Any, opt: dmuon.Muon) -> None:
    model.blocks[0].up.bias = nn.Parameter(torch.zeros(41))


def taken_out(model: Any, opt: dmuon.Muon) -> None:
    """A matrix and a bias leave their groups."""
    lost = {model.blocks[1].up.weight, model.blocks[0].up.bias}
    for group in opt.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter not in lost]


ADAPTER = ["blocks.1.down.down.weight", "blocks.1.down.up.weight"]


def warned(
    mesh: Any, change: Any, fsdp: bool, schedule: dict[str, Any], on: range = range(4)
) -> tuple[list[list[str]], int]:
    """What dmuon logs in each of five steps, where a model changes after the second; how often it was walked.

    `on`: the ranks whose model changes.
    """
    torch.manual_seed(0)
    model = make_gpt(depth=2)
    dedicate(model, mesh, schedule)
    if fsdp:
        shard(model, mesh)
    opt = dmuon.Muon(model)
    num_walks, walk = 0, model.named_parameters

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_walks
        num_walks += 1
        return walk(*args, **kwargs)

    with logged() as messages:
        by_step = []
        for step in range(5):
            if step == 2 and rank_of(mesh) in on:
                change(model, opt)
            if step == 4 and change is frozen_adapter:
                model.requires_grad_(True)
            model(batch(step)[:, :-1])  # an evaluation, of which weights might be left
            loss_of(model, batch(step)).backward()
            model.named_parameters = counted  # type: ignore[method-assign]
            opt.step()
            del model.named_parameters
            opt.zero_grad()
            by_step.append([message for message in messages if "no group" in message])
            messages.clear()
    return by_step, num_walks


def names_in(message: str) -> list[str]:
    return message.split("'")[1 : 2 * message.count("', '") + 3 : 2]


@pytest.mark.parametrize(("mesh", "fsdp", "schedule"), [((1,), False, AHEAD), ((2, 2), False, KEPT)])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (nothing, []),
        (another_model, []),
        (adapter, ADAPTER),
        (adapter_and_other_models, ADAPTER),
        (adapter_in_a_group, []),
        (replaced, ["head.weight"]),
        (replaced_parameter, ["blocks.0.up.bias"]),
        (taken_out, ["blocks.0.up.bias", "blocks.1.up.weight"]),
    ],
)
def test_the_next_step_names_what_no_group_has_once(ranks, mesh, fsdp, schedule, change, expected):
    (by_step, num_walks), *others = ranks.run(warned, mesh, change=change, fsdp=fsdp, schedule=schedule)
    named = [[name for message in step for name in names_in(message)] for step in by_step]
    assert named == [[], [], expected, [], []]
    assert [len(step) for step in by_step] == [0, 0, bool(expected), 0, 0]
    assert all("If another optimizer trains it, clip by torch.nn.utils.clip_grad_norm_" in text for text in by_step[2])
    assert num_walks == {nothing: 1, adapter_and_other_models: 4}.get(change, 2)
    for silent, walks in others:
        assert silent == [[]] * 5 and walks == num_walks


def test_one_of_the_ranks_that_alone_have_something_new_names_it_a_step_later(ranks):
    results = ranks.run(warned, (2, 2), change=replaced_parameter, fsdp=False, schedule=AHEAD, on=range(2, 4))
    named = [[[name for message in step for name in names_in(message)] for step in steps] for steps, _ in results]
    assert named[:2] == [[[]] * 5] * 2
    assert sorted(named[2:]) == [[[]] * 5, [[], [], [], ["blocks.0.up.bias"], []]]


@pytest.mark.parametrize("schedule", [AHEAD, KEPT])
@pytest.mark.parametrize("change", [nothing, adapter])
def test_steps_of_fully_shard_neither_walk_nor_warn(ranks, change, schedule):
    (by_step, num_walks), *_ = ranks.run(warned, (2, 2), change=change, fsdp=True, schedule=schedule)
    named = [[name for message in step for name in names_in(message)] for step in by_step]
    assert named == [[], [], ADAPTER if change is adapter else [], [], []]
    assert num_walks == (2 if change is adapter else 1)


def test_what_was_named_is_not_named_again_after_a_change_of_groups():
    model = make_gpt(depth=2)
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    with logged() as messages:
        for step in range(3):
            if step == 1:
                adapter(model, opt)
            if step == 2:
                model.scale = nn.Parameter(torch.ones(3))
                opt.add_param_group({"params": [model.scale]})
            loss_of(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()
    assert [names_in(message) for message in messages if "no group" in message] == [ADAPTER]


def clipped_by_torch(mesh: Any) -> str:
    model, opt = ready(mesh)
    adapter_in_a_group(model, opt)
    loss_of(model, batch(1)).backward()
    with pytest.raises(ValueError) as raised:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    dmuon.clip_grad_norm_(model, 1.0)
    opt.step()
    return str(raised.value)


def test_torch_s_clipping_refuses_what_was_given_to_adamw_on_every_rank(ranks):
    """It would add up norms of DTensors and of plain tensors."""
    for message in ranks.run(clipped_by_torch, (2, 2)):
        assert "parameters of which fully_shard manages some and others not" in message


def test_what_came_frozen_and_is_unfrozen_later_is_named_too(ranks):
    (by_step, _), *_ = ranks.run(warned, (2,), change=frozen_adapter, fsdp=False, schedule=AHEAD)
    assert [names_in(message) for step in by_step for message in step] == [ADAPTER] and len(by_step[4]) == 1
    assert "was frozen then" in by_step[4][0]


def of_a_loss(mesh: Any, used_on: list[int]) -> list[str]:
    """Warnings of the steps after AdamW got a parameter that the model lacks, which some ranks' losses use."""
    model, opt = ready(mesh)
    scale = nn.Parameter(torch.ones(41))
    opt.add_param_group({"params": [scale]})
    with logged() as messages:
        for step in range(2):
            loss = loss_of(model, batch(step))
            (loss + scale.square().mean() if rank_of(mesh) in used_on else loss).backward()
            opt.step()
            opt.zero_grad()
    return messages


def test_a_parameter_of_no_model_that_no_loss_uses_is_named_once(ranks):
    named, *others = ranks.run(of_a_loss, (2, 2), used_on=[])
    assert others == [[]] * 3
    assert len(named) == 1 and "a parameter of shape (41,), which the model does not have" in named[0]
    assert "'blocks.0.up.bias'" in named[0] and "taken from the model before fully_shard" in named[0]


@pytest.mark.parametrize("used_on", [[3], [0, 1, 2, 3]])
def test_a_loss_may_have_parameters(ranks, used_on):
    assert ranks.run(of_a_loss, (2, 2), used_on=used_on) == [[]] * 4
