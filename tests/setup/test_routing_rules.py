"""Which parameters are embeddings or unfit, what select() may change, and which models are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from dmuon._setup.routing import route


def tree(**children: Any) -> nn.Module:
    """A module with these modules and parameters."""
    module = nn.Module()
    for name, child in children.items():
        setattr(module, name, child)
    return module


def weight(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad)


def linear(rows: int = 4, cols: int = 3) -> nn.Linear:
    return nn.Linear(cols, rows, bias=False)


def tied(embedding: nn.Embedding) -> nn.Module:
    last = linear(*embedding.weight.shape)
    last.weight = embedding.weight
    return tree(tokens=embedding, last=last)


class Scaled(nn.Parameter):
    pass


def routes(model: nn.Module, **options: Any) -> dict[str, tuple[str, str]]:
    """(algorithm, why) of each parameter."""
    return {row.name: (row.algorithm, row.why) for row in route(model, **{"select": None, **options})[1]}


MATRIX = ("muon", "matrix of Linear")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(3, 4), {"weight": MATRIX, "bias": ("adamw", "1-D")}),
        (nn.Conv2d(2, 3, 2, bias=False), {"weight": ("adamw", "no rule for Conv2d (4-D)")}),
        (tree(scalar=weight(), w=weight(4, 3)), {"scalar": ("adamw", "0-D"), "w": ("adamw", "no rule for Module")}),
        (linear().bfloat16(), {"weight": MATRIX}),
        (linear(1), {"weight": ("adamw", "a side of 1")}),
        (tree(stack=weight(2, 3, 4)), {"stack": ("adamw", "no rule for Module (3-D)")}),
        (tree(row=weight(1, 1, 4)), {"row": ("adamw", "a side of 1")}),
        (tree(w=weight(4, 3, dtype=torch.float64)), {"w": ("adamw", "dtype torch.float64")}),
        (tree(w=weight(4, 3, requires_grad=False)), {"w": ("frozen", "frozen")}),
        (tree(w=weight(4, 0)), {"w": ("adamw", "empty")}),
        (tree(w=Scaled(torch.zeros(4, 3))), {"w": ("adamw", "a Scaled")}),
    ],
    ids=[
        *("linear", "convolution", "in no layer", "bfloat16", "one output", "3-D", "row"),
        *("float64", "frozen", "empty", "subclass"),
    ],
)
def test_a_trainable_matrix_is_muons_and_nothing_else_is(model, expected):
    assert routes(model) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (tree(a=nn.Embedding(5, 4)), {"a.weight": ("adamw", "embedding")}),
        (tree(a=nn.EmbeddingBag(5, 4)), {"a.weight": ("adamw", "embedding")}),
        (tied(nn.Embedding(5, 4)), {"tokens.weight": ("adamw", "tied to an embedding")}),
        (tree(pos_emb=weight(5, 4)), {"pos_emb": ("adamw", "embedding, by its name 'pos_emb'")}),
        (tree(WTE=tree(table=weight(5, 4))), {"WTE.table": ("adamw", "embedding, by its name 'WTE.table'")}),
        (tree(tokEmbedding=weight(5, 4)), {"tokEmbedding": ("adamw", "embedding, by its name 'tokEmbedding'")}),
        (tree(emb2=weight(5, 4)), {"emb2": ("adamw", "embedding, by its name 'emb2'")}),
        (tree(tokEmb=weight(5, 4)), {"tokEmb": ("adamw", "embedding, by its name 'tokEmb'")}),
        (tree(posemb=weight(5, 4)), {"posemb": ("adamw", "embedding, by its name 'posemb'")}),
        (tree(tok_embs=weight(5, 4)), {"tok_embs": ("adamw", "embedding, by its name 'tok_embs'")}),
        (tree(pos_embed=weight(1, 5, 4)), {"pos_embed": ("adamw", "embedding, by its name 'pos_embed'")}),
        (tree(ensemble=tree(w=weight(5, 4))), {"ensemble.w": ("adamw", "no rule for Module")}),
        (tree(members=weight(5, 4)), {"members": ("adamw", "no rule for Module")}),
        (tree(patch_embed=linear()), {"patch_embed.weight": MATRIX}),
        (
            tree(patch_embed=nn.Conv2d(2, 3, 2, bias=False)),
            {"patch_embed.weight": ("adamw", "no rule for Conv2d (4-D)")},
        ),
        (tree(embedder=tree(mlp=linear())), {"embedder.mlp.weight": MATRIX}),
    ],
    ids=[
        *("embedding", "bag", "tied", "parameter's name", "module's name", "word's part", "numbered"),
        *("camel case", "end of a word", "plural", "of one row of rows"),
        *("module's name has emb inside", "parameter's has", "projection", "convolution", "module inside one"),
    ],
)
def test_embeddings_are_adamws_by_kind_or_by_name_unless_they_multiply(model, expected):
    assert routes(model) == expected


def test_a_tied_leaf_is_one_with_all_its_places():
    model = tree(first=linear(3), second=linear(3), third=linear(3))
    model.third.weight = model.first.weight
    leaves, table = route(model, None)
    assert [(leaf.name, leaf.shape) for leaf in leaves] == [("first.weight", (3, 3)), ("second.weight", (3, 3))]
    assert [row.name for row in table] == ["first.weight", "second.weight"]
    assert len(leaves[0].places) == 2 and len(leaves[1].places) == 1


def test_select_is_asked_of_every_parameter_and_none_leaves_the_rule():
    model = tree(up=nn.Linear(3, 4), frozen=weight(2, 2, requires_grad=False))
    asked = []
    found = routes(model, select=lambda *arguments: asked.append(arguments))
    assert found == routes(model)
    assert [name for name, _, _ in asked] == ["frozen", "up.weight", "up.bias"]
    assert all(module is (model.up if "up" in name else model) for name, module, _ in asked)
    assert all(parameter is dict(model.named_parameters())[name] for name, _, parameter in asked)


def test_select_overrules_in_both_directions():
    model = tree(body=linear(), lm_head=linear(5))
    found = routes(model, select=lambda name, *_: name.startswith("lm_head"))
    assert found == {
        "body.weight": ("adamw", "not selected by select()"),
        "lm_head.weight": ("muon", "selected by select()"),
    }


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (tree(w=weight(4)), "one of shape (4,): 1-D"),
        (tree(w=weight(4, 3, requires_grad=False)), "one of shape (4, 3): frozen"),
        (tree(w=weight(4, 0)), "one of shape (4, 0): empty"),
        (tree(w=weight(4, 3, dtype=torch.float64)), "one of shape (4, 3): dtype torch.float64"),
        (tree(w=Scaled(torch.zeros(4, 3))), "one of shape (4, 3): a Scaled"),
    ],
    ids=["vector", "frozen", "empty", "float64", "subclass"],
)
def test_select_cannot_choose_what_cannot_be_orthogonalised(model, got):
    with pytest.raises(ValueError, match=r"^dedicate_params: select: selected 'w'\. Expected: ") as caught:
        route(model, lambda *_: True)
    assert str(caught.value).endswith(f"got {got}.")


def test_what_select_raises_is_the_cause():
    with pytest.raises(ValueError, match=r"select: raised KeyError for 'weight': 'weight'") as caught:
        route(linear(), lambda name, *_: {}[name])
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ValueError, match=r"^plan: select: raised KeyError"):
        route(linear(), lambda name, *_: {}[name], function="plan")


@pytest.mark.parametrize("answer", ["muon", 1, torch.tensor(True)])
def test_select_answers_true_false_or_none(answer):
    with pytest.raises(
        ValueError, match=r"select: expected True, False, a dmuon.View, several of them or None for 'weight', got "
    ):
        route(linear(), lambda *_: answer)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_matrix_with_gradient_hooks_is_left_to_adamw_or_refused(register):
    model = linear()
    getattr(model.weight, register)(lambda _: None)
    with pytest.raises(ValueError, match=r"^dedicate_params: model: 'weight' has gradient hooks"):
        route(model, None)
    assert routes(model, select=lambda *_: False) == {"weight": ("adamw", "not selected by select()")}
    assert routes(model, function="inventory") == {"weight": MATRIX}


def test_nothing_needs_values():
    with torch.device("meta"):
        model = linear()
    for function in ("dedicate_params", "plan"):
        assert routes(model, function=function) == {"weight": MATRIX}


@pytest.mark.parametrize("function", ["dedicate_params", "inventory"])
def test_what_has_no_shape_is_refused(function):
    with pytest.raises(ValueError, match=rf"^{function}: model: 'weight' has no shape yet"):
        route(nn.LazyLinear(4, bias=False), None, function)


def test_the_table_has_a_line_for_each_parameter():
    model = tree(up=nn.Linear(3, 4), frozen=weight(2, 2, requires_grad=False), scale=weight())
    lines = [line.split() for line in str(route(model, None)[1]).splitlines()]
    assert lines[:5] == [
        ["parameter", "shape", "updated", "by", "owner", "unit", "why"],
        ["frozen", "2x2", "nobody", "frozen"],
        ["scale", "scalar", "AdamW", "0-D"],
        ["up.weight", "4x3", "Muon", "matrix", "of", "Linear"],
        ["up.bias", "4", "AdamW", "1-D"],
    ]
