"""`views_for` names the rows that Transformers' own forwards compute each head and each projection by."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
import transformers as hf
from dmuon._setup.routing import route
from known_models import BUILD, run

import dmuon

PROBE = "dmuon_probe"
Seen = dict[str, torch.Tensor]


def built(name: str) -> nn.Module:
    """Without biases, so that no row means zero."""
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.zero_() if key.endswith("bias") else parameter.copy_(torch.randn_like(parameter) / 8)
    return model


def seen_by_attention(model: nn.Module) -> dict[str, Seen]:
    """Q, K and V, [heads, tokens, head_dim], as each attention hands them to its kernel; by the attention's name."""
    names = {module: name for name, module in model.named_modules()}
    seen: dict[str, Seen] = {}

    def probe(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        seen[names[module]] = {"q": q[0].clone(), "k": k[0].clone(), "v": v[0].clone()}
        result = q.softmax(-1).sum(-1, keepdim=True) * v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return result.transpose(1, 2), None

    project = torch.nn.functional._in_projection_packed

    def packed(*operands: Any) -> Any:
        found = project(*operands)
        heads = [part[:, 0].unflatten(-1, (4, -1)).transpose(0, 1).clone() for part in found]
        (name,) = (name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention))
        seen[name] = dict(zip("qkv", heads, strict=True))
        return found

    hf.AttentionInterface.register(PROBE, probe)
    hf.AttentionMaskInterface.register(PROBE, hf.masking_utils.eager_mask)
    model.set_attn_implementation(PROBE)
    torch.nn.functional._in_projection_packed = packed
    try:
        with torch.no_grad():
            run(model)
    finally:
        torch.nn.functional._in_projection_packed = project
    return seen


def place_of(label: str, nope: int | None) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Where a matrix of this label shows: of q, k or v a head, and numbers in it."""
    part, _, head = label.rstrip("]").partition("[")
    heads = slice(int(head), int(head) + 1) if head else slice(None)
    tensor = {"kv_latent": "k"}.get(part, part[0])
    columns = {"nope": slice(nope), "rope": slice(nope, None), "latent": slice(nope)}.get(part.partition("_")[2])
    yield tensor, (heads, slice(None), columns or slice(None))
    if part == "kv_latent":
        yield "v", (slice(None),)


def matrices_by_label(model: nn.Module, known: Any, name: str) -> dict[str, torch.Tensor]:
    """The elements of each matrix of a parameter, by the label of it."""
    parameter = model.get_parameter(name)
    answer = known(name, model.get_submodule(name.rpartition(".")[0]), parameter)
    views = answer if isinstance(answer, tuple | list) else (answer,)
    elements = torch.arange(parameter.numel())
    matrices = []
    for view, part in zip(views, elements.split([view.count * view.rows * view.cols for view in views]), strict=True):
        matrices += view.matrices(part)
    return dict(zip(known.parts[name], matrices, strict=True))


@torch.no_grad()
def without(parameter: torch.Tensor, elements: torch.Tensor) -> torch.Tensor:
    old = parameter.clone()
    parameter.view(-1)[elements.reshape(-1)] = 0
    return old


def check_attention(name: str, heads: bool) -> int:
    """Zeroes one matrix after the other: its part of q, k or v alone becomes zero. Returns the number of matrices."""
    model = built(name)
    known = dmuon.views_for(model, heads=heads)
    before = seen_by_attention(model)
    count = 0
    for parameter in known.parts:
        if "gate_up" in parameter:
            continue
        attention = next(owner for owner in before if parameter.startswith(f"{owner}."))
        nope = getattr(model.config, "qk_nope_head_dim", None)
        matrices = matrices_by_label(model, known, parameter)
        assert (
            torch.cat([m.reshape(-1) for m in matrices.values()])
            .sort()
            .values.equal(torch.arange(model.get_parameter(parameter).numel()))
        )
        for label, elements in matrices.items():
            old = without(model.get_parameter(parameter), elements)
            after = seen_by_attention(model)[attention]
            expected = {key: value.clone() for key, value in before[attention].items()}
            for tensor, where in place_of(label, nope):
                assert before[attention][tensor][where].abs().min() > 0
                expected[tensor][where] = 0
            for key, value in expected.items():
                assert torch.equal(after[key], value), f"{parameter}: {label}: {key}"
            model.get_parameter(parameter).data.copy_(old)
            count += 1
    return count


@pytest.mark.parametrize("name", BUILD)
def test_each_head_is_what_the_attention_computes_from_its_rows(name):
    assert check_attention(name, heads=True) >= 2 * (4 + 2 + 2)


FUSED = ("phi3", "gpt neox", "deepseek v2", "deepseek v2 lite", "deepseek v3")


@pytest.mark.parametrize("name", BUILD)
def test_each_projection_is_what_the_attention_computes_from_its_rows(name):
    count = check_attention(name, heads=False)
    assert count == {"phi3": 6, "gpt neox": 6, "siglip": 3, "paligemma": 3}.get(name, 12 if name in FUSED else 0)


class Recorded(nn.Module):
    """An activation that keeps what it is given."""

    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        self.gate = gate.clone()
        return gate + 1


WITH_GATES = ("phi3", "mixtral", "qwen2 moe", "qwen3 moe", "glm4 moe", "deepseek v2", "deepseek v2 lite", "deepseek v3")


@torch.no_grad()
def computed(holder: nn.Module, expert: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer, or one expert of it, gives its activation, and its result."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    act = Recorded()
    setattr(holder, "act_fn" if expert is not None else "activation_fn", act)
    if expert is None:
        return holder(x), act.gate
    return holder(x, torch.full((3, 1), expert), torch.ones(3, 1)), act.gate


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("name", WITH_GATES)
def test_gate_and_up_are_what_layers_and_experts_compute_from_their_rows(name, heads):
    model = built(name)
    known = dmuon.views_for(model, heads=heads)
    fused = [parameter for parameter in known.parts if "gate_up" in parameter]
    assert fused
    for parameter in fused:
        values = model.get_parameter(parameter)
        holder = model.get_submodule(parameter.removesuffix(".weight").rpartition(".")[0])
        for label, elements in matrices_by_label(model, known, parameter).items():
            part, _, number = label.rstrip("]").partition("[")
            experts = range(values.shape[0]) if number else [None]
            before = [computed(holder, expert) for expert in experts]
            old = without(values, elements)
            after = [computed(holder, expert) for expert in experts]
            values.data.copy_(old)
            for expert, (result, gate), (old_result, old_gate) in zip(experts, after, before, strict=True):
                if number and expert != int(number):
                    assert result.equal(old_result) and gate.equal(old_gate)
                elif part == "gate":
                    assert gate.abs().max() == 0 and result.abs().min() > 0  # the activation adds 1
                else:
                    assert part == "up" and gate.equal(old_gate) and result.abs().max() == 0


def test_the_table_says_what_was_taken_for_what():
    model = built("deepseek v2")
    known = dmuon.views_for(model, heads=True)
    table = {row.name: row for row in route(model, known)[1]}
    layer = "model.layers.1."
    expected = {
        "self_attn.q_b_proj.weight": ("4 of (12 + 8) x 16", "q_nope, q_rope by head of DeepseekV2Attention"),
        "self_attn.kv_a_proj_with_mqa.weight": ("16 x 64, 8 x 64", "kv_latent, k_rope of DeepseekV2Attention"),
        "self_attn.kv_b_proj.weight": ("4 of (12 + 10) x 16", "k_nope, v by head of DeepseekV2Attention"),
        "mlp.experts.gate_up_proj": ("8 of 24 x 64", "gate, up by expert of DeepseekV2Experts"),
        "self_attn.o_proj.weight": ("64 x 40", "matrix of Linear"),
    }
    for name, (words, why) in expected.items():
        row = table[layer + name]
        assert (", ".join(map(str, row.views)), row.why) == (words, why)
    assert f"{layer}self_attn.kv_b_proj.weight" in str(known) and "k_nope, v by head" in str(known)


def test_interleaved_projections_of_all_heads_are_one_view():
    model = built("gpt neox")
    rows = {row.name: row for row in route(model, dmuon.views_for(model))[1]}
    row = rows["gpt_neox.layers.1.attention.query_key_value.weight"]
    assert list(map(str, row.views)) == ["4*(16 + 16 + 16) x 64"] and row.why == "q, k, v of GPTNeoXAttention"


def test_nothing_is_split_that_has_neither_heads_nor_neighbours():
    known = dmuon.views_for(built("llama"))
    assert known.parts == {} and str(known) == "nothing to split"
    assert all("mlp" not in name and "o_proj" not in name for name in dmuon.views_for(built("llama"), heads=True).parts)


def test_frozen_parameters_go_by_the_default_rule():
    model = built("phi3")
    model.requires_grad_(False)
    assert all(row.algorithm == "frozen" for row in route(model, dmuon.views_for(model))[1])


def test_a_model_without_memory_has_the_same_views():
    with torch.device("meta"):
        model = BUILD["gpt neox"]()
    assert dmuon.views_for(model).parts == dmuon.views_for(built("gpt neox")).parts
    found = dmuon.inventory(model, select=dmuon.views_for(model))
    heights = [matrix.get("heights") for unit in found["units"] for matrix in unit["matrices"]]
    assert heights.count([16, 16, 16]) == 2


def test_a_part_of_a_module_is_known_too():
    model = nn.ModuleDict({"inner": built("gemma")})
    assert all(name.startswith("inner.model.layers.") for name in dmuon.views_for(model, heads=True).parts)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hf.GPT2Model(hf.GPT2Config(n_embd=16, n_layer=1, n_head=2)), "got GPT2Model of gpt2"),
        (lambda: nn.Sequential(built("llama"), hf.BertModel(hf.BertConfig(hidden_size=12))), "got BertModel of bert"),
        (lambda: nn.Linear(4, 4), "got Linear, which has no module of them"),
        (lambda: 3, "model: expected an nn.Module, got int"),
    ],
)
def test_an_unknown_model_is_refused_with_the_known_ones(make, words):
    with pytest.raises(ValueError, match="views_for: model: ") as caught:
        dmuon.views_for(make())
    assert words in str(caught.value)
    assert "an nn.Module" in words or "deepseek_v2, deepseek_v3, gemma" in str(caught.value)


def test_what_is_no_choice_of_heads_is_refused():
    with pytest.raises(ValueError, match="views_for: heads: expected True or False, got 4"):
        dmuon.views_for(built("llama"), heads=4)


def test_a_projection_that_something_replaced_is_refused_by_name():
    model = built("llama")
    model.model.layers[0].self_attn.q_proj = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match=r"expected a parameter 'model.layers.0.self_attn.q_proj.weight', as of Llama"):
        dmuon.views_for(model, heads=True)


def test_views_of_a_copy_are_refused():
    model = built("phi3")
    with pytest.raises(ValueError, match=r"select: expected the views of this model; got .* 'model.layers.0.self_attn"):
        route(copy.deepcopy(model), dmuon.views_for(model))
