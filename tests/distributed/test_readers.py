"""Units whose own module is not called: the modules that read their weights begin and end their uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from scenario import Session, check
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from training import AHEAD, FAR_AHEAD, KEPT, KEPT_NO_COPY, NO_COPY, ON_DEMAND, dedicate

import dmuon

WIDTH = 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.o(self.q(self.norm(x)).softmax(-1))
        return x + self.down(F.gelu(self.up(x)))


def jointly(a: Layer, b: Layer, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer i of both towers, as pi0 computes it: by their linears."""
    joint = torch.cat([a.q(a.norm(x)), b.q(b.norm(y))], 1).softmax(1)
    x, y = x + a.o(joint[:, : x.shape[1]]), y + b.o(joint[:, x.shape[1] :])
    return x + a.down(F.gelu(a.up(x))), y + b.down(F.gelu(b.up(y)))


class Towers(nn.Module):
    def __init__(self, depth: int = 6, checkpoints: bool = False) -> None:
        super().__init__()
        self.vlm = nn.ModuleList(Layer() for _ in range(depth))
        self.expert = nn.ModuleList(Layer() for _ in range(depth))
        self.action = nn.Linear(WIDTH, 4)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor, y: torch.Tensor, prefix: bool = False) -> torch.Tensor:
        if prefix:  # calls the layers of one tower
            for layer in self.vlm:
                x = layer(x)
            return x.mean((1, 2))[:, None] + self.action(y).mean(1)
        for a, b in zip(self.vlm, self.expert, strict=True):
            x, y = checkpoint(jointly, a, b, x, y, use_reentrant=False) if self.checkpoints else jointly(a, b, x, y)
        return self.action(y).mean(1) + 0.1 * x.mean((1, 2))[:, None]


def towers_loss(step: int, **options: Any) -> Any:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(3, 5, WIDTH, generator=drawn), torch.randn(3, 2, WIDTH, generator=drawn)
        target = torch.randn(3, 4, generator=drawn)
        return F.mse_loss(model(x, y, **options), target)

    return loss


def is_matrix(name: str) -> bool:
    return name.endswith("weight") and "norm" not in name and not name.startswith("head")


def towers(s: Session, wrapping: str, checkpoints: bool = False, frozen: bool = False, prefix: bool = False) -> None:
    torch.manual_seed(0)
    model = Towers(checkpoints=checkpoints)
    if frozen:
        model.vlm.requires_grad_(False)
    units = {
        "none": None,
        "root": lambda model: [],
        "linears": lambda model: [m for m in model.modules() if isinstance(m, nn.Linear)],
    }
    s.start(model, units=units[wrapping], names=is_matrix)
    for step in range(4):
        s.backward(towers_loss(step), 0.5)
        s.backward(towers_loss(10 + step, prefix=prefix and step % 2 == 1), 0.5)
        s.step()
        with torch.no_grad():
            s.notes.append(float(sum(towers_loss(50)(model, rank) for rank in range(s.size))))


@pytest.mark.parametrize("mesh", [(1,), (4,), (2, 2)])
@pytest.mark.parametrize("wrapping", ["none", "root", "linears"])
def test_towers_computed_together_equal_a_single_process(ranks, mesh, wrapping):
    *notes, expected = check(ranks, towers, mesh, schedule=AHEAD, wrapping=wrapping)
    assert all(note == pytest.approx(expected, rel=1e-3) for note in notes)


@pytest.mark.parametrize("schedule", [ON_DEMAND, FAR_AHEAD, KEPT, NO_COPY, KEPT_NO_COPY])
@pytest.mark.parametrize("wrapping", ["none", "root"])
def test_towers_under_other_schedules(ranks, wrapping, schedule):
    check(ranks, towers, schedule=schedule, wrapping=wrapping)


@pytest.mark.parametrize("wrapping", ["none", "root", "linears"])
@pytest.mark.parametrize("more", [{"checkpoints": True}, {"frozen": True}, {"prefix": True}])
def test_towers_with(ranks, wrapping, more):
    if wrapping == "root" and "prefix" in more:
        pytest.skip("FSDP2 itself hangs if a step's backwards use different parameters of one group")
    check(ranks, towers, schedule=AHEAD, wrapping=wrapping, **more)


class Casting(Towers):
    """Casts to the dtype of weights, as pi0's authors do."""

    seen: set[torch.dtype]

    def forward(self, x: torch.Tensor, y: torch.Tensor, prefix: bool = False) -> torch.Tensor:
        self.seen = {layer.up.weight.dtype for layer in (*self.vlm, *self.expert)}
        (dtype,) = self.seen
        return super().forward(x.to(dtype), y.to(dtype), prefix).float()


def in_bf16(mesh: Any, checkpoints: bool) -> list[tuple[float, float]]:
    """Loss and norm of the gradients of equal passes. In the first one no reader is known."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    torch.manual_seed(0)
    model = Casting(checkpoints=checkpoints)
    dedicate(model, mesh, AHEAD, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    opt = dmuon.Muon(model)
    found = []
    for _ in range(3):
        loss = towers_loss(0)(model, 0)
        loss.backward()
        assert model.seen == {torch.bfloat16} and model.vlm[0].up.weight.dtype == torch.float32
        found.append((float(loss.detach()), float(dmuon.clip_grad_norm_(model, 1e9))))
        opt.zero_grad()
    return found


@pytest.mark.parametrize("checkpoints", [False, True])
def test_placeholders_have_the_compute_dtype_in_a_forward(ranks, checkpoints):
    for first, *later in ranks.run(in_bf16, (2, 2), checkpoints=checkpoints):
        assert first[0] > 0 and first[1] > 0 and later == [first] * 2


class AdaNorm(nn.Module):
    """Its dense layer has another dtype than the layer around it, as in pi0.5 in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.half)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,)) * (1 + self.dense(x.mean(1, keepdim=True).half()))


def of_two_dtypes(s: Session, wrapping: str) -> None:
    torch.manual_seed(0)
    model = Towers(depth=3, checkpoints=True)
    for layer in model.expert:
        layer.norm = AdaNorm()
    units = {"none": None, "root": lambda model: []}
    s.start(model, units=units[wrapping], names=lambda name: is_matrix(name) or "dense" in name)
    for step in range(4):
        s.backward(towers_loss(step))
        s.step()


@pytest.mark.parametrize("wrapping", ["none", "root"])
def test_towers_whose_layers_have_two_dtypes(ranks, wrapping):
    """One process rounds momenta and updates of the dense layers to float16, an owner keeps fp32."""
    check(ranks, of_two_dtypes, schedule=AHEAD, wrapping=wrapping, bound=0.1)


class Policy(nn.Module):
    """Calls its model's compiled `forward`, as lerobot's policies do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Towers(depth=2)
        self.model.forward = torch.compile(self.model.forward, backend="eager")

    def forward(self, *args: Any) -> torch.Tensor:
        return self.model.forward(*args)


def compiled(s: Session) -> None:
    torch.manual_seed(0)
    s.start(Policy(), units=None, names=is_matrix)
    for step in range(3):
        s.backward(towers_loss(step))
        s.step()


@pytest.mark.xdist_group("compiles")
def test_towers_whose_forward_is_compiled(ranks):
    check(ranks, compiled, schedule=AHEAD)


# ---- weights that are read elsewhere ----


class Doubled(torch.autograd.Function):
    """x W^T, written by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return 2 * gradient @ weight, 2 * gradient.flatten(0, -2).mT @ x.flatten(0, -2)


class Chained(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for item in self:
            x = torch.tanh(item.q(x))
        return x


class Odd(nn.Module):
    """Reads weights in one of several ways. `blocks` are units whose own modules are called or not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.feats = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.ModuleList([Layer(), Layer()])})
        self.called = Chained(Layer() for _ in range(2))
        self.params = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(getattr(self, self.way)(x)).mean(1)

    def parent(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.linear(x, block.q.weight, block.q.bias).tanh()
        return x

    def parent_and_call(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        for block in self.blocks:
            x = x + F.linear(x, block.q.weight.t()).tanh()
        return x

    def read_before_call(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.linear(x, block.q.weight.t()).tanh()
        for block in self.blocks:
            x = block(x)
        return x

    def sibling(self, x: torch.Tensor) -> torch.Tensor:
        self.blocks[1].lent = [self.blocks[0].q.weight]
        x = self.blocks[0](x)
        x = x + F.linear(x, self.blocks[1].lent[0])
        return self.blocks[1](x)

    def borrowed(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) + self.blocks[0].o(x)
        return x

    def views(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            first, second = block.up.weight.chunk(2)
            rows = block.up.weight[4:20]
            x = x + (F.linear(x, first) - F.linear(x, second))[..., :WIDTH] @ rows.unsqueeze(0).mT.squeeze(0)
        return x

    def fused(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.cat([block.q.weight for block in self.blocks])
        return x + F.linear(x, weight).unflatten(-1, (3, WIDTH)).tanh().sum(-2)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ (self.blocks[0].q.weight @ self.blocks[1].q.weight)).tanh() + self.blocks[2](x)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.linear(x, block.o.weight / block.o.weight.norm())
        return x

    def custom(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + Doubled.apply(x, block.q.weight).tanh()
        return x

    def items(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.feats["a"](x).tanh()
        for layer in self.feats["b"]:
            x = layer(x)
        return x

    def items_in_part(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.feats["b"]:
            x = x + layer.q(x).tanh()
        return self.feats["b"][0].o(x)

    def list_with_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(x)

    def parameter_list(self, x: torch.Tensor) -> torch.Tensor:
        for parameter in self.params:
            x = x + (x @ parameter).tanh()
        return x

    def plain_forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x

    def checkpointed(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(lambda x, block=block: F.linear(x, block.q.weight).tanh(), x, use_reentrant=False)
        return x

    def reentrant(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.params[0].sum(0)
        for block in self.blocks:
            x = x + checkpoint(lambda x, block=block: block.q(x).tanh(), x, use_reentrant=True)
        return x


WAYS = [
    "parent", "parent_and_call", "read_before_call", "sibling", "borrowed", "views", "fused", "product", "scaled",
    "custom", "items", "items_in_part", "list_with_forward", "parameter_list", "plain_forward", "checkpointed",
    "reentrant",
]  # fmt: skip


def odd_loss(step: int) -> Any:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(100 * step + rank)
        return F.mse_loss(model(torch.randn(3, 5, WIDTH, generator=drawn)), torch.randn(3, 4, generator=drawn))

    return loss


def odd(s: Session, way: str, wrapping: str) -> None:
    torch.manual_seed(0)
    model = Odd(way)
    units = {"none": None, "root": lambda model: []}[wrapping]
    select = lambda name, module, parameter: True if name.startswith("params") else None  # noqa: E731
    names = lambda name: is_matrix(name) or name.startswith("params")  # noqa: E731
    s.start(model, units=units, names=names, options={"select": select})
    for step in range(4):
        s.backward(odd_loss(step))
        s.step()


@pytest.mark.parametrize("wrapping", ["none", "root"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_read_elsewhere_equal_a_single_process(ranks, way, wrapping):
    check(ranks, odd, schedule=AHEAD, way=way, wrapping=wrapping)


@pytest.mark.parametrize("way", ["parent", "views", "custom", "reentrant"])
@pytest.mark.parametrize("schedule", [KEPT, NO_COPY])
def test_weights_read_elsewhere_under_other_schedules(ranks, way, schedule):
    check(ranks, odd, schedule=schedule, way=way, wrapping="none")


# ---- fully_shard of several modules ----


class Called(Towers):
    """Calls its layers, one tower after the other."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, prefix: bool = False) -> torch.Tensor:
        for a, b in zip(self.vlm, self.expert, strict=True):
            x = a(x)
            y = b(y + x.mean(1, keepdim=True))
        return self.action(y).mean(1) + 0.1 * x.mean((1, 2))[:, None]


def grouped(s: Session, by: str) -> None:
    """Layer i of both towers is one unit, because fully_shard has them in one group or the user says so."""
    torch.manual_seed(0)
    model = Towers(depth=3) if by == "units, jointly" else Called(depth=3)
    pairs = [[a, b] for a, b in zip(model.vlm, model.expert, strict=True)]

    def shard(model: nn.Module) -> list[nn.Module]:
        for pair in pairs:
            fully_shard(pair, mesh=s.mesh)
        return []

    options = {} if by == "fully_shard" else {"units": pairs}
    s.start(model, units=shard if by == "fully_shard" else None, names=is_matrix, options=options)
    if not s.reference:
        s.notes.append({row.unit for row in dmuon.routing_table(model) if row.algorithm == "muon"})
    for step in range(4):
        s.backward(towers_loss(step))
        s.step()


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize("by", ["fully_shard", "units", "units, jointly"])
def test_several_modules_are_a_unit(ranks, mesh, by):
    *notes, _ = check(ranks, grouped, mesh, schedule=AHEAD, by=by)
    assert all(note == [{"vlm.0", "vlm.1", "vlm.2", "action"}] for note in notes)


class Around(nn.Module):
    """Its calls read the weight of a layer, which is called elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.linear(x, self.layers[0].weight), self.gate


class Rooted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.around = Around()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(x)[0]


@pytest.mark.parametrize("call", [lambda m, x: m(x), lambda m, x: m.around(x)[0]], ids=["root", "around units"])
def test_a_backward_of_other_weights_than_were_read_is_refused(call):
    model = Rooted()
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    for _ in range(2):  # the first call finds who reads
        x = torch.ones(2, 8, requires_grad=True)
        of_earlier = call(model, x).sum()
        (call(model, x).sum() * model.around.gate.sum()).backward()
        opt.step()
        with pytest.raises(ValueError, match=r"through 'around\.layers\.0\.weight', whose weights have changed"):
            of_earlier.backward()
        opt.zero_grad()


class Part(nn.Module):
    """Its output is a view. If the caller changes it in place, autograd skips the output's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)[:, :4]


def test_so_is_that_of_an_output_whose_hooks_autograd_skips():
    model = nn.Sequential(Part())
    dmuon.dedicate_params(model)
    opt = dmuon.Muon(model)
    of_earlier = model[0](torch.ones(2, 8, requires_grad=True)).mul_(2).sum()
    model(torch.ones(2, 8)).sum().backward()
    opt.step()
    with pytest.raises(ValueError, match="through '0', whose weights have changed"):
        of_earlier.backward()
