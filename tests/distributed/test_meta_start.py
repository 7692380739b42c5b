"""A model that is built on the meta device begins as one that one process built, and no rank ever holds it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dsd
import torch.nn as nn
import transformers
from accounting import FP32, Counted, Sizes, layout
from default_device import own_random_numbers, random_state
from dmuon._running import casts
from models import batch, loss_of, make_gpt
from refusals import REFUSED, Refusals, expect_refusal, rank_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import init
from training import AHEAD, dedicate, shard

import dmuon

MESHES = [(1, 4), (2, 2), (4, 1), (1, 3), (1,)]
SEED = 5
TINY: dict[str, Any] = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def all_kinds_of_init(model: nn.Module) -> None:
    """What nn.init has, and what people write by hand."""
    fill: list[Callable[..., Any]] = [
        init.normal_, init.trunc_normal_, init.orthogonal_, init.xavier_uniform_, init.kaiming_normal_, init.eye_,
        lambda p: init.trunc_normal_(p, std=0.02, a=-0.001, b=0.01), lambda p: init.sparse_(p, 0.3),
        lambda p: p.data.normal_(0, 0.1), lambda p: setattr(p, "data", torch.randn(p.shape)),
    ]  # fmt: skip
    if model.head.weight.dtype == torch.bfloat16:
        del fill[2]  # orthogonal_ knows no bf16
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name]
    for part in matrices.pop().chunk(2):
        init.trunc_normal_(part)
    for place, parameter in enumerate(matrices):
        fill[place % len(fill)](parameter)
    for place, parameter in enumerate(p for n, p in model.named_parameters() if p.ndim < 2 or "blocks" not in n):
        (init.trunc_normal_, init.uniform_, init.ones_)[place % 3](parameter)
    block = model.blocks[0]
    with torch.no_grad():
        model.embedding.weight[3].fill_(0)  # as padding is
        model.head.weight[:, 2:4].normal_()
        model.head.weight.exponential_()
        model.head.weight.mul_(torch.bernoulli(model.head.weight.clamp(0, 1)))
        model.norm.weight.add_(torch.randint_like(model.norm.weight, 9))
        model.head.weight.div_(model.head.weight.norm())  # which has come back to be read
        block.qkv.weight.copy_(torch.randn_like(block.qkv.weight) / 7)
        block.qkv.weight[:5].normal_()  # in parts
        block.qkv.weight.chunk(3)[2].mul_(2)
        init.normal_(block.down.weight)
        block.out.weight.t().uniform_()
        block.out.weight.mul_(1 / block.out.weight.norm())  # reads what it has just written
        block.down.weight[3, 1:4] = 7.0  # no longer whole on all ranks
        block.down.weight.view(-1)[:10].bernoulli_(0.5)
        model.embedding.weight.copy_(torch.rand_like(model.embedding.weight))
    for parameter in model.blocks[1].up.parameters():  # the weight first
        init.normal_(parameter)


def columns_first() -> nn.Module:
    """Random numbers are drawn in the order of memory."""
    model = make_gpt(depth=1)
    model.blocks[0].up.weight = nn.Parameter(torch.empty(24, 41).t())
    return model


def own_init(model: Any) -> None:
    model.is_custom_code = lambda: False  # for which Transformers takes what fully_shard has changed
    model.init_weights()


# Name: (its maker, what fully_shard gets beside the model, its initialisation).
MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], None]]] = {
    "ours": (lambda: make_gpt(depth=2), lambda m: m.blocks, all_kinds_of_init),
    "bf16": (lambda: make_gpt(depth=2).bfloat16(), lambda m: m.blocks, all_kinds_of_init),
    "columns first": (columns_first, lambda m: m.blocks, lambda m: [init.normal_(p) for p in m.parameters()]),
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=101)
        ),
        lambda m: m.transformer.h,
        own_init,
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, intermediate_size=56)),
        lambda m: m.model.layers,
        own_init,
    ),
    "mixture of experts": (
        lambda: transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**TINY, **EXPERTS)),
        lambda m: m.model.layers,
        own_init,
    ),
}


@contextmanager
def ties_outlive_to_empty() -> Iterator[None]:
    """For one process, as they do under fully_shard."""
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapping)


def of_one_process(name: str) -> dict[str, torch.Tensor]:
    make, _, fill = MODELS[name]
    with torch.device("meta"):
        model = make()
    with ties_outlive_to_empty():
        model.to_empty(device=torch.get_default_device())
        torch.manual_seed(SEED)
        fill(model)
    return {**{name: p.detach() for name, p in model.named_parameters()}, "state": random_state()}


def on_meta(mesh: Any, name: str = "ours") -> Any:
    """A model after fully_shard."""
    make, blocks, _ = MODELS[name]
    with torch.device("meta"):
        model = make()
    dedicate(model, mesh, AHEAD)
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@own_random_numbers()
def differences(mesh: Any, models: list[str]) -> list[str]:
    found = []
    for name in models:
        fill = MODELS[name][2]
        expected = of_one_process(name)
        model = on_meta(mesh, name)
        model.to_empty(device=mesh.device_type)
        torch.manual_seed(SEED)
        fill(model)
        if not torch.equal(random_state(), expected.pop("state")):
            found.append(f"{name}: random state")
        dmuon.Muon(model)
        weights = model.state_dict()
        for key, value in expected.items():
            got = weights[key]
            if not torch.equal(got.full_tensor() if isinstance(got, DTensor) else got, value):
                found.append(f"{name}: {key}")
    return found


# A shape of mesh decides where matrices and shards lie, a model how it is filled: that of all kinds on every mesh.
@pytest.mark.parametrize(
    ("mesh", "models"),
    [
        ((2, 2), list(MODELS)),
        ((1, 4), ["ours", "columns first"]),
        ((4, 1), ["ours", "bf16"]),
        ((1, 3), ["ours", "mixture of experts"]),
        ((1,), ["ours"]),
    ],
    ids=str,
)
def test_initial_weights_equal_those_of_one_process(ranks, mesh, models):
    assert ranks.run(differences, mesh, models=models) == [[]] * torch.Size(mesh).numel()


def measure(mesh: Any, width: int = 160, depth: int = 4) -> dict[str, Any]:
    with Counted(mesh.device_type) as counted:
        with torch.device("meta"):
            model = nn.Sequential(
                *(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2))) for _ in range(depth))
            )
        dedicate(model, mesh, AHEAD)
        with counted.during("measured"):
            model.to_empty(device=mesh.device_type)
            torch.manual_seed(SEED)
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
            optimizer = dmuon.Muon(model, ns_dtype=torch.float32)
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
    start, kept = counted.found()["measured"]
    plan = dmuon.plan(model).memory_bytes
    stats = optimizer.stats()
    return {**layout(optimizer), "start": start, "kept": kept, "plan": plan, "stats": stats}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_holds_what_it_keeps_and_one_unit_more(ranks, mesh):
    results = ranks.run(measure, mesh)
    sizes = Sizes(results[0], mesh)
    matrix = FP32 * max(results[0]["elements"])
    unit = FP32 * max(sizes.unit(index) for index in range(sizes.num_units))
    num_ranks = len(results)
    provisional = -(-FP32 * sum(results[0]["elements"]) // num_ranks)  # equal matrices: of each rank the same
    for slot, result in enumerate(results):
        node_copies = FP32 * sizes.held_column(slot) if sizes.num_replicates > 1 else 0
        kept = node_copies + 3 * FP32 * sizes.owned(slot)
        slack = matrix // 6
        assert abs(result["kept"] - kept) <= slack, f"slot {slot}"
        # The provisional values, and one unit: the matrix that is being written or on its way.
        assert result["start"] <= kept + provisional + unit + slack, f"slot {slot}"
        assert result["start"] <= result["plan"][slot] + unit + slack, f"slot {slot}"
        assert result["stats"]["peak_bytes"] <= result["plan"][slot], f"slot {slot}"


def loaded(mesh: Any, whole: dict[str, torch.Tensor]) -> list[str]:
    """A checkpoint instead of an initialisation, and a step of training from it."""
    model = on_meta(mesh)
    model.to_empty(device=mesh.device_type)
    opt = dmuon.Muon(model)
    dsd.set_model_state_dict(model, dict(whole), options=dsd.StateDictOptions(full_state_dict=True))
    saved = dsd.get_model_state_dict(model, options=dsd.StateDictOptions(full_state_dict=True))
    loss_of(model, batch(0)).backward()
    opt.step()
    return [key for key, value in saved.items() if not torch.equal(value, whole[key])]


def test_a_checkpoint_can_be_loaded_instead(ranks):
    whole = make_gpt(seed=9, depth=2).state_dict()
    assert ranks.run(loaded, (2, 2), whole=whole) == [[]] * 4


def written_with_zeros(mesh: Any, names: list[str], part: int = 0) -> str:
    """Zeros are values, too. Returns the error of a forward, or of a write of `part` rows."""
    model = on_meta(mesh)
    model.to_empty(device=mesh.device_type)
    opt = dmuon.Muon(model)
    try:
        with dmuon.full_params(model, writeback=True), torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim < 2 or "blocks" not in name or name in names:
                    parameter[: part or len(parameter)].zero_()
        loss_of(model, batch(0)).backward()
    except ValueError as error:
        return str(error)
    opt.step()
    return f"{sum(float(norm) for norm in dmuon.weight_norms(model).values())}"


def test_zeros_that_are_written_whole_are_values(ranks):
    matrices = [name for name, p in make_gpt(depth=2).named_parameters() if p.ndim == 2 and "blocks" in name]
    assert ranks.run(written_with_zeros, (2, 2), names=matrices) == ["0.0"] * 4
    for message in ranks.run(written_with_zeros, (2, 2), names=matrices[1:]):
        assert f"'{matrices[0]}' has no values, nor have 0 more" in message
    for message in ranks.run(written_with_zeros, (2, 2), names=matrices, part=3):
        assert f"full_params: '{matrices[0]}': expected all elements or none written, as it has no values" in message


@own_random_numbers()
def grouped(mesh: Any, **options: Any) -> tuple[list[str], list[str]]:
    """The parameters of AdamW, and of what torch's functions save of the optimizer."""
    model = on_meta(mesh)
    model.to_empty(device=mesh.device_type)
    all_kinds_of_init(model)
    small = [p for p in model.parameters() if p.ndim < 2]
    opt = dmuon.Muon(model, adamw_groups=[{"params": small, "weight_decay": 0.0}], **options)
    names = {id(p): name for name, p in model.named_parameters()}
    of_adamw = [names[id(p)] for g in opt.param_groups if g["algorithm"] == "adamw" for p in g["params"]]
    return of_adamw, list(dsd.get_optimizer_state_dict(model, opt)["state"])


def test_adamw_does_not_get_what_muon_has(ranks):
    model = make_gpt(depth=2)
    others = [n for n, p in model.named_parameters() if p.ndim < 2 or "embedding" in n or "head" in n]
    for of_adamw, saved in ranks.run(grouped, (2, 2)):
        assert sorted(of_adamw) == sorted(others)
        assert sorted(saved) == sorted(name for name, _ in model.named_parameters())


@own_random_numbers()
def only_in_part(mesh: Any) -> list[str]:
    """Where matrices have values already, what AdamW updates is drawn as in one process; a second time counts."""
    torch.manual_seed(0)
    model, expected = make_gpt(depth=1), make_gpt(depth=1)
    model.embedding.to("meta"), model.head.to("meta")
    dedicate(model, mesh, AHEAD)
    shard(model, mesh)
    model.embedding.to_empty(device=mesh.device_type), model.head.to_empty(device=mesh.device_type)
    torch.manual_seed(rank_of(mesh))
    init.normal_(model.embedding.weight)
    model.to(mesh.device_type)  # shows the others too
    for part in (model, expected):
        part.norm.weight.data.mul_(3)
        part.norm.bias.data[2:4].fill_(5)
        torch.manual_seed(SEED)
        part.embedding.reset_parameters(), part.head.reset_parameters()
    dmuon.Muon(model)
    weights = model.state_dict()
    return [n for n, p in expected.named_parameters() if not torch.equal(weights[n].full_tensor(), p.detach())]


def test_a_part_on_the_meta_device_and_a_second_initialisation(ranks):
    assert ranks.run(only_in_part, (2, 2)) == [[]] * 4


@own_random_numbers()
def moved(mesh: Any) -> bool:
    """Casts and moves that change nothing, and a second to_empty, leave values where they are."""
    model = on_meta(mesh)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(SEED)
    init.normal_(model.blocks[0].up.weight)
    model.to(mesh.device_type)
    model.float()
    torch.manual_seed(SEED)
    expected = torch.empty(model.blocks[0].up.weight.shape).normal_()
    for name, parameter in model.named_parameters():
        if name != "blocks.0.up.weight":
            init.zeros_(parameter)
    dmuon.Muon(model)
    return torch.equal(model.state_dict()["blocks.0.up.weight"].full_tensor(), expected)


def test_what_moves_a_model_keeps_its_values(ranks):
    assert ranks.run(moved, (1, 3)) == [True] * 3


def what_is_left(mesh: Any) -> list[str]:
    """Of the start, after Muon: nothing; of flags that were set, everything."""
    model = on_meta(mesh)
    model.to_empty(device=mesh.device_type)
    for parameter in model.parameters():
        init.normal_(parameter)
    model.blocks[1].requires_grad_(False)
    model.norm.weight.requires_grad_(False)
    model.embedding.weight.flag = "kept"
    dmuon.Muon(model)
    frozen = {*(f"blocks.1.{name}" for name, _ in model.blocks[1].named_parameters()), "norm.weight"}
    asked_first = {path: vars(module)["_apply"] for path, module in model.named_modules() if "_apply" in vars(module)}
    found = [
        f"_apply of {path}"
        for path, apply in asked_first.items()
        if getattr(apply._method, "func", None) is not casts._apply
    ]
    for name, parameter in model.named_parameters():
        if "Provisional" in type(parameter).__name__:
            found.append(name)
        if parameter.requires_grad == (name in frozen):
            found.append(f"{name}: requires_grad")
    return [*found, model.embedding.weight.flag]


def test_nothing_is_left_of_a_start_but_what_the_user_set(ranks):
    assert ranks.run(what_is_left, (2, 2)) == [["kept"]] * 4


refused = Refusals()


@refused("'embedding.weight' is on the meta device", "after fully_shard", "or after Muon a checkpoint.", how=0)
@refused("'blocks.0.qkv.weight' is on the meta device", "Expected: model.to_empty(device=...)", how=1)
def never_given_memory(mesh: Any, how: int) -> None:
    model = on_meta(mesh)
    if how == 0:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.to_empty(device=mesh.device_type, recurse=False)
    dmuon.Muon(model)


@refused("a forward, and 'blocks.0.qkv.weight' has no values, nor have 3 more", "or a checkpoint loaded", part=False)
@refused("a forward, and 'blocks.0.qkv.weight' has no values, nor have 3 more", "or a checkpoint loaded", part=True)
def half_initialised(mesh: Any, part: bool) -> None:
    model = on_meta(mesh)
    model.to_empty(device=mesh.device_type)
    torch.manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "blocks.0" not in name:
            init.normal_(parameter)
    dmuon.Muon(model)
    with dmuon.full_params(model, writeback=True):
        pass
    model.blocks[0](torch.zeros(2, 3, 24)) if part else model(batch(0))


@refused("'blocks.0.up.weight'", "one rank alone keeps a matrix", "finishes one weight before the next", how="norm")
@refused("'blocks.0.up.weight'", "one rank alone keeps a matrix", "finishes one weight before the next", how="part")
@refused("'blocks.0.up.weight'", "the values of 'blocks.1.up.weight'", "Expected", how="other")
@refused("'blocks.0.up.weight'", "t_.default", how="t_")
@refused("'blocks.0.up.weight'", "assigning values of torch.float32 and shape (24,) to .data", how="data")
@refused("'blocks.0.up.weight'", "register_hook", how="hook")
@refused("'blocks.0.up.weight'", "a view as torch.complex64", how="complex")
def values_that_are_elsewhere(mesh: Any, how: str) -> None:
    model = on_meta(mesh)
    model.to_empty(device=mesh.device_type)
    up, other = model.blocks[0].up.weight, model.blocks[1].up.weight
    init.normal_(up)
    init.normal_(other)
    with torch.no_grad():
        if how == "norm":
            up.div_(up.norm())
        elif how == "part":
            init.normal_(up[:5])
            up[:5].div_(up[:5].norm())
        elif how == "other":
            up.copy_(other)
        elif how == "t_":
            up.t_()
        elif how == "data":
            up.data = torch.zeros(24)
        elif how == "hook":
            up.register_hook(lambda _: None)
        else:
            up.view(torch.complex64)


@refused("Muon: ranks differ", "initial values of 'blocks.0.qkv.weight'", how="seed")
@refused("Muon: ranks differ", "initial values of 'blocks.0.qkv.weight'", how="only one")
@refused("Muon: ranks differ", "initial values of 'blocks.0.qkv.weight'", how="std")
@refused("Muon: ranks differ", "initial values of 'blocks.0.qkv.weight'", how="copied")
@refused("Muon: ranks differ", "initial values of 'embedding.weight'", how="embedding")
def unlike_on_ranks(mesh: Any, how: str) -> None:
    model = on_meta(mesh)
    model.to_empty(device=mesh.device_type)
    rank = rank_of(mesh)
    torch.manual_seed(SEED + (rank if how in ("seed", "copied") else 0))
    if how in ("seed", "only one") and (how == "seed" or rank == 0):
        model.blocks.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())
    weight = model.blocks[0].qkv.weight
    if how == "std":
        init.normal_(weight, std=1.0 + rank)
    elif how == "copied":
        weight.data.copy_(torch.randn(weight.shape))
    elif how == "embedding":
        init.constant_(model.embedding.weight, rank)
    dmuon.Muon(model)


@refused(
    "adamw_groups[0]: params[2]: expected parameters that AdamW updates", "'blocks.0.qkv.weight', which Muon updates"
)
def matrices_for_adamw(mesh: Any) -> None:
    model = on_meta(mesh)
    model.to_empty(device=mesh.device_type)
    dmuon.Muon(model, adamw_groups=[{"params": list(model.blocks.parameters())}])


@refused("cast the model before dedicate_params")
def cast_after_memory(mesh: Any) -> None:
    model = on_meta(mesh)
    model.to_empty(device=mesh.device_type)
    model.double()
    dmuon.Muon(model)


@refused("'blocks.0.qkv.weight' or its module was replaced", early=True)
@refused("'blocks.0.qkv.weight' or its module was replaced", early=False)
def replaced(mesh: Any, early: bool) -> None:
    model = on_meta(mesh)
    for is_now in (early, not early):
        if is_now:
            model.blocks[0].qkv.weight = nn.Parameter(torch.zeros(72, 24))
        else:
            model.to_empty(device=mesh.device_type)
    model.to(mesh.device_type)
    dmuon.Muon(model)


@refused("a state dict was taken or loaded between dedicate_params and Muon")
def state_dict_between(mesh: Any) -> None:
    model = on_meta(mesh)
    model.to_empty(device=mesh.device_type)
    model.state_dict()


@refused("one rank alone keeps a matrix. Expected: fully_shard before model.to_empty(...)")
def sharded_after_memory(mesh: Any) -> None:
    with torch.device("meta"):
        model = make_gpt(depth=1)
    dedicate(model, mesh, AHEAD)
    model.to_empty(device=mesh.device_type)
    shard(model, mesh)


@pytest.mark.parametrize(REFUSED, refused)
def test_a_wrong_start_is_refused(ranks, program, options, words):
    expect_refusal(ranks, program, options, words)
