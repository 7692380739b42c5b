"""What a call writes into its inputs is its caller's: later uses have the gradients of what the tensor holds then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from models import VOCABULARY, batch, loss_of
from refusals import REFUSED, Refusals, expect_refusal
from scenario import Session, blocks_of, check
from torch.utils.checkpoint import checkpoint
from training import AHEAD, KEPT, REPLICATED

import dmuon

WIDTH = 12


class Marked(torch.Tensor):
    """A class of the user's own."""


class Block(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.call = call

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(torch.relu(x)))  # whose backward needs x no more

    def forward(self, *inputs: Any) -> Any:
        return self.call(self, *inputs)


class Model(nn.Module):
    """`use` calls the blocks; `call` is their forward."""

    def __init__(self, call: Callable[..., Any], use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(call) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.use = use

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.use(self, self.embedding(tokens) * 1.0))


def adds(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = block.computed(x)
    x += y
    return y


def adds_silently(block: Block, x: torch.Tensor) -> None:
    adds(block, x)


def adds_and_returns(block: Block, x: torch.Tensor) -> torch.Tensor:
    adds(block, x)
    return x


def halves(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = block.computed(x)
    x.mul_(0.5)
    return y


def rectifies(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Its backward needs what it has written."""
    x.relu_()
    return block.down(block.up(x))


def detaches(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = block.computed(x)
    x.detach_()
    return y


def assigns(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = block.computed(x)
    x.data = x.data * 0.5
    return y


def transposes(block: Block, x: torch.Tensor) -> torch.Tensor:
    y = block.computed(x)
    x.transpose_(0, 1)
    return y


def appends(block: Block, x: torch.Tensor, found: list[torch.Tensor]) -> None:
    found.append(block.computed(x))


def sets(block: Block, entries: dict[str, torch.Tensor]) -> None:
    entries["x"] = entries["x"] + block.computed(entries["x"])


def writes_a_leaf(block: Block, entries: dict[str, torch.Tensor]) -> None:
    """A hook on this leaf would outlive the step."""
    entries["bias"] = block.down.bias
    entries["x"] = entries["x"] + block.computed(entries["x"])


def takes_out(block: Block, entries: dict[str, torch.Tensor]) -> None:
    adds(block, entries.pop("x"))


def looks_at(block: Block, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
    return block.computed(x if other is None else x + other.detach())


def if_marked(block: Block, x: torch.Tensor) -> torch.Tensor:
    return block.computed(x).as_subclass(torch.Tensor) * (2 if type(x) is Marked else 3)


def marks(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Reads an attribute of its input, and sets another one."""
    x.other = x.factor + 1
    return block.computed(x) * x.factor


def remembers(block: Block, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    block.last = parameter
    return block.computed(x) * (1 + parameter.square().mean())


def calls_itself(block: Block, x: torch.Tensor, times: int = 2) -> torch.Tensor:
    """The inner calls end in the backward before the rest of the outer one."""
    x = x + block.computed(x)
    return block(x, times - 1) if times else x


def checkpoints_itself(block: Block, x: torch.Tensor, times: int = 2) -> torch.Tensor:
    x = x + block.computed(x)
    return checkpoint(block, x, times - 1, use_reentrant=True) if times else x


def asks(block: Block, x: torch.Tensor, question: Callable[[], torch.Tensor] | None = None) -> torch.Tensor:
    found = torch.relu(block.up(x))
    return block.down(found if question is None else found * question())


def fills(block: Block, x: torch.Tensor, out: torch.Tensor) -> None:
    out += block.computed(x)


def with_outputs(model: Model, x: torch.Tensor) -> torch.Tensor:
    """The caller of each block goes on with what the block has written."""
    for block in model.blocks:
        x = block(x) + x
    return x


def of_other_views(model: Model, x: torch.Tensor) -> torch.Tensor:
    """The caller uses one view of a tensor, and the blocks change another one."""
    for block in model.blocks:
        block(x[:2])
    return x * torch.cat([x[1:], x[:1]])


def one_after_the_other(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def of_itself(model: Model, x: torch.Tensor, trains: bool) -> torch.Tensor:
    """Inside of a call of its first block the model calls itself, and so this block too."""

    def question() -> torch.Tensor:
        outer, model.use = model.use, one_after_the_other
        try:
            with torch.set_grad_enabled(trains):
                return model(batch(0)[:, :3]).square().mean()
        finally:
            model.use = outer

    return one_after_the_other(model, model.blocks[0](x, question))


def of_marked(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block((x * 1.0).as_subclass(Marked))
    return x


def with_parameters(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x, model.head.weight)
        del block.last
    return x


def with_marks(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        given = x * 1.0
        given.factor = 2.0
        x = block(given) * given.other
    return x


def beside_a_branch(model: Model, x: torch.Tensor) -> torch.Tensor:
    """The loss does not come to the second block, so its weights neither move nor decay."""
    return model.blocks[0](x, model.blocks[1](x))


def of_a_view(model: Model, x: torch.Tensor) -> torch.Tensor:
    shape = x.shape
    return with_outputs(model, x.view(-1, WIDTH)).view(shape)


def alone(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        block(x)
    return x


def with_hooks(model: Model, x: torch.Tensor) -> torch.Tensor:
    """The first hook is of what the tensor held before, the second one of what it holds afterwards."""
    x.register_hook(lambda gradient: gradient * 3)
    model.blocks[0](x)
    x.register_hook(lambda gradient: gradient * 5)
    model.blocks[1](x)
    return x


def changed_once_more(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        block(x).mul_(2)
        x = x * 1.5
    return x


def of_a_list(model: Model, x: torch.Tensor) -> torch.Tensor:
    found = [x]
    for block in model.blocks:
        block(found[-1], found)
    return torch.stack(found).sum(0)


def of_a_dict(model: Model, x: torch.Tensor) -> torch.Tensor:
    entries = {"x": x}
    for block in model.blocks:
        block(entries)
    return entries["x"]


def taken_out(model: Model, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        block({"x": x})
    return x


def of_a_buffer(model: Model, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    for block in model.blocks:
        block(x, out)
    return out


class Mixer(nn.Module):
    """Reads weights of two blocks, which it does not hold, and writes into its second input."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = (*blocks,)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        first, second = self.blocks
        out += torch.tanh(x @ first.up.weight.T) @ second.up.weight


class Mixed(Model):
    def __init__(self, call: Callable[..., Any], use: Callable[..., torch.Tensor]) -> None:
        super().__init__(call, use)
        self.mixer = Mixer(self.blocks)


def mixed(model: Mixed, x: torch.Tensor) -> torch.Tensor:
    out = one_after_the_other(model, x) * 1.0
    model.mixer(x, out)
    return out


def no_blocks(model: nn.Module) -> list[nn.Module]:
    """The model alone is under fully_shard."""
    return []


def reads_weights(block: nn.Module, inputs: Any) -> Any:
    """A pre-hook, whose backward comes after that of the block's own operations."""
    return inputs[0] * block.down.weight.square().mean()


def trained(
    s: Session,
    call: Callable[..., Any],
    use: Callable[..., torch.Tensor],
    units: Any = None,
    hook: Any = None,
    made: Any = Model,
) -> None:
    model = made(call, use)
    for block in model.blocks if hook else ():
        block.register_forward_pre_hook(hook)
    s.start(model, units=units)
    s.train(0, 1, 2)


@pytest.mark.parametrize(
    ("mesh", "schedule", "kind"),
    [
        ((2, 2), AHEAD, {"call": adds, "use": with_outputs}),
        ((2, 2), REPLICATED, {"call": halves, "use": with_outputs}),
        ((4,), KEPT, {"call": adds, "use": of_a_view}),
        ((1,), AHEAD, {"call": halves, "use": of_a_view}),
        ((4,), AHEAD, {"call": adds_silently, "use": alone}),
        ((2, 2), AHEAD, {"call": adds_silently, "use": alone, "units": no_blocks}),
        ((2, 2), KEPT, {"call": adds, "use": with_hooks}),
        ((4,), REPLICATED, {"call": adds_and_returns, "use": changed_once_more}),
        ((1,), KEPT, {"call": detaches, "use": with_outputs}),
        ((2, 2), AHEAD, {"call": appends, "use": of_a_list}),
        ((1,), REPLICATED, {"call": sets, "use": of_a_dict}),
        ((4,), AHEAD, {"call": fills, "use": of_a_buffer}),
        ((2, 2), KEPT, {"call": writes_a_leaf, "use": of_a_dict}),
        ((4,), REPLICATED, {"call": takes_out, "use": taken_out}),
        ((1,), AHEAD, {"call": takes_out, "use": taken_out}),
        ((2, 2), AHEAD, {"call": adds_silently, "use": of_other_views}),
        ((1,), KEPT, {"call": adds_silently, "use": of_other_views}),
        ((2, 2), AHEAD, {"call": rectifies, "use": with_outputs}),
        ((1,), REPLICATED, {"call": rectifies, "use": of_a_view}),
        ((4,), KEPT, {"call": rectifies, "use": of_a_view, "units": no_blocks}),
        ((2, 2), AHEAD, {"call": looks_at, "use": beside_a_branch}),
        ((1,), REPLICATED, {"call": looks_at, "use": beside_a_branch}),
        ((2, 2), AHEAD, {"call": calls_itself, "use": one_after_the_other}),
        ((4,), KEPT, {"call": calls_itself, "use": one_after_the_other, "units": blocks_of}),
        ((2, 2), AHEAD, {"call": asks, "use": partial(of_itself, trains=True)}),
        ((4,), REPLICATED, {"call": asks, "use": partial(of_itself, trains=True)}),
        ((2, 2), AHEAD, {"call": asks, "use": partial(of_itself, trains=False)}),
        ((1,), REPLICATED, {"call": asks, "use": partial(of_itself, trains=False)}),
        ((2, 2), AHEAD, {"call": looks_at, "use": mixed, "made": Mixed}),
        ((1,), REPLICATED, {"call": looks_at, "use": mixed, "made": Mixed}),
        ((2, 2), AHEAD, {"call": checkpoints_itself, "use": one_after_the_other}),
        ((1,), KEPT, {"call": checkpoints_itself, "use": one_after_the_other}),
        ((2, 2), AHEAD, {"call": if_marked, "use": of_marked}),
        ((1,), KEPT, {"call": if_marked, "use": of_marked}),
        ((2, 2), REPLICATED, {"call": remembers, "use": with_parameters}),
        ((1,), AHEAD, {"call": remembers, "use": with_parameters}),
        ((4,), REPLICATED, {"call": marks, "use": with_marks}),
        ((1,), AHEAD, {"call": marks, "use": with_marks}),
        ((4,), KEPT, {"call": if_marked, "use": of_marked, "units": blocks_of}),
        ((2, 2), AHEAD, {"call": looks_at, "use": one_after_the_other, "hook": reads_weights}),
        ((4,), AHEAD, {"call": looks_at, "use": one_after_the_other, "hook": reads_weights, "units": blocks_of}),
        ((1,), AHEAD, {"call": looks_at, "use": one_after_the_other, "hook": reads_weights}),
    ],
)
def test_what_a_call_writes_has_its_gradients(ranks, mesh, schedule, kind):
    check(ranks, trained, mesh, schedule=schedule, **kind)


def test_a_retained_gradient_is_that_of_what_the_tensor_holds(ranks):
    kept = []

    def use(model: Model, x: torch.Tensor) -> torch.Tensor:
        x.retain_grad()
        kept.append(x)
        return alone(model, x)

    model = Model(adds_silently, use)
    plain = copy.deepcopy(model)
    dmuon.dedicate_params(model)
    dmuon.Muon(model)
    for each in model, plain:
        loss_of(each, batch(0)).backward()
    torch.testing.assert_close(kept[0].grad, kept[1].grad)


def test_each_of_two_backwards_goes_where_its_loss_comes_from():
    found = []

    def use(model: Model, x: torch.Tensor) -> torch.Tensor:
        found.append(model.blocks[1](x))
        return model.blocks[0](x, found[-1])

    model = Model(looks_at, use)
    plain = copy.deepcopy(model)
    dmuon.dedicate_params(model)
    dmuon.Muon(model)
    gradients = []
    for each in model, plain:
        each.embedding.requires_grad_(False)  # else both backwards go through it
        loss_of(each, batch(0)).backward()
        found.pop().sum().backward()
        gradients.append([each.head.weight.grad, each.blocks[0].up.bias.grad, each.blocks[1].up.bias.grad])
    torch.testing.assert_close(*gradients)


refused = Refusals()


@refused("'blocks.0' has changed an input in place, a view of the kind", "such as fully_shard, chunk and unbind make")
def under_fully_shard(mesh: Any) -> None:
    model = Session(mesh, AHEAD).start(Model(halves, with_outputs), units=blocks_of)
    loss_of(model, batch(0)).backward()


@refused("has changed an input in place, a leaf that requires a gradient", "x = x + y in place of x += y")
def of_a_leaf(mesh: Any) -> None:
    model = Session(mesh, AHEAD).start(Model(halves, with_outputs), units=None)
    model.blocks[0](torch.ones(2, WIDTH, requires_grad=True))


@refused("has changed an input in place, from shape (2, 12) to (12, 2), which the caller's tensor cannot follow")
def of_its_shape(mesh: Any) -> None:
    model = Session(mesh, AHEAD).start(Model(transposes, with_outputs), units=None)
    model.blocks[0](torch.ones(2, WIDTH, requires_grad=True) * 1.0)


@refused("has changed an input in place, to other memory (x.data = y), which the caller's tensor cannot follow")
def of_its_memory(mesh: Any) -> None:
    model = Session(mesh, AHEAD).start(Model(assigns, with_outputs), units=None)
    model.blocks[0](torch.ones(2, WIDTH, requires_grad=True) * 1.0)


@pytest.mark.parametrize(REFUSED, refused)
def test_what_autograd_forbids_is_refused_by_name(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
