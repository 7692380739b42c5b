"""Output heads are AdamW's: by the model's own word, by its classes, by a name outside of blocks, or by shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from dmuon._setup.routing import route
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

BY_SHAPE = "by its shape: the largest embedding's, and no other matrix has it"


class Tree(nn.Module):
    """With these modules, and other attributes."""

    def __init__(self, **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


class Says(Tree):
    """Names its head, as models of Transformers and of timm do."""

    def get_output_embeddings(self) -> nn.Module | None:
        return getattr(self, "of_language", None)

    def get_classifier(self) -> Any:
        return getattr(self, "of_classes", None)


class Config:
    num_labels = 5


class NeedsMore(Tree):
    def get_classifier(self, which: int) -> nn.Module:
        return self.body


def linear(rows: int = 4, cols: int = 3) -> nn.Linear:
    return nn.Linear(cols, rows, bias=False)


def blocks(**children: Any) -> nn.ModuleList:
    return nn.ModuleList(Tree(**children) for _ in range(2))


def heads_of(model: nn.Module) -> dict[str, str]:
    """Of the linear layers that AdamW updates: why."""
    found = {row.name.removesuffix(".weight"): row for row in route(model, None)[1]}
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear) and path in found]
    left = [path for path in linears if found[path].algorithm == "adamw"]
    return {path: found[path].why.removeprefix("output head, ") for path in left}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Says(body=linear(), of_language=linear(5)), {"of_language": "by get_output_embeddings()"}),
        (Says(body=linear(), of_classes=linear(5)), {"of_classes": "by get_classifier()"}),
        (Says(of_classes=(linear(5), linear(5))), {}),  # not in the model
        (Tree(inner=Says(body=linear(), of_language=linear(5))), {"inner.of_language": "by get_output_embeddings()"}),
        (NeedsMore(body=linear()), {}),
    ],
    ids=["of language", "of classes", "elsewhere", "model inside", "method of another kind"],
)
def test_a_model_says_which_it_is(model, expected):
    assert heads_of(model) == expected


def test_a_model_that_returns_its_embedding_says_nothing():
    model = Says(body=linear(), of_language=nn.Embedding(5, 3), last=linear(5))
    assert heads_of(model) == {"last": BY_SHAPE}


def test_of_a_classifier_with_hidden_layers_the_last_is_the_head():
    model = Says(body=linear(), of_classes=Tree(up=linear(), out=linear(5)))
    assert heads_of(model) == {"of_classes.out": "by get_classifier()"}


def test_a_model_may_say_several():
    first, second = linear(5), linear(5)
    model = Says(first=first, second=second, body=linear(), of_classes=(first, second))
    assert heads_of(model) == dict.fromkeys(("first", "second"), "by get_classifier()")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Tree(num_classes=5, body=linear(), to_classes=linear(5)), {"to_classes": "by its rows: num_classes = 5"}),
        (Tree(config=Config, one=linear(5), two=linear(5), rest=linear()), {"two": "by its rows: num_labels = 5"}),
        (Tree(config=Config, with_none=linear(6), rest=linear(7)), {"with_none": "by its rows: num_labels = 5"}),
        (Tree(config=Config, layers=blocks(one=linear(5))), {}),
        (Tree(config=Config, body=linear()), {}),
        (Tree(config={"num_labels": 5}, body=linear(5)), {}),
        (Tree(task=Tree(num_labels=5, up=linear(5)), down=linear(5)), {"task.up": "by its rows: num_labels = 5"}),
    ],
    ids=["of the model", "of its config, the last", "and one for none", "in blocks", "none", "a dict", "of a part"],
)
def test_as_many_rows_as_classes_make_a_head(model, expected):
    assert heads_of(model) == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Tree(body=linear(), lm_head=linear(5)), {"lm_head": "by its name 'lm_head'"}),
        (Tree(score=linear(), body=linear(5)), {"score": "by its name 'score'"}),
        (Tree(body=Tree(Output=linear())), {"body.Output": "by its name 'body.Output'"}),
        (Tree(layers=blocks(output=linear(), head=linear())), {}),
        (Tree(seq=nn.Sequential(Tree(output=linear()), Tree(output=linear()))), {}),
        (Tree(seq=nn.Sequential(linear(), Tree(output=linear()))), {"seq.1.output": "by its name 'seq.1.output'"}),
        (Tree(conv=linear(), fc=linear()), {"fc": "by its name 'fc'"}),
        (Tree(fc=linear(), head=linear()), {"head": "by its name 'head'"}),
        (
            Tree(classifier=Tree(dense=linear(), out_proj=linear())),
            {},
        ),
        (
            Tree(block=Tree(output=nn.Sequential(linear(), linear())), lm_head=linear(5)),
            {"lm_head": "by its name 'lm_head'"},
        ),
        (Tree(output=nn.Sequential(linear(), linear())), {"output.1": "by its name 'output.1'"}),
        (Tree(classifier=nn.Sequential(linear(), linear())), {"classifier.1": "by its name 'classifier.1'"}),
        (Tree(fc=linear(), body=linear()), {}),
        (Tree(value_head=linear(), pre_classifier=linear()), {"value_head": "by its name 'value_head'"}),
        (
            Tree(policy_head=nn.Sequential(linear(), linear()), value_head=linear()),
            {"policy_head.1": "by its name 'policy_head.1'", "value_head": "by its name 'value_head'"},
        ),
        (
            Tree(final_layer=Tree(linear=linear(), modulation=linear())),
            {"final_layer.linear": "by its name 'final_layer.linear'"},
        ),
        (Tree(layers=blocks(fc_out=linear(), final_layer=Tree(linear=linear()))), {}),
        (Tree(to_logits=linear()), {"to_logits": "by its name 'to_logits'"}),
    ],
    ids=[
        *("last", "first", "inside", "in a list's items", "in a Sequential's alike", "alone in one"),
        *(
            "torchvision's",
            "better name",
            "in a head",
            "in a block's Sequential",
            "output Sequential",
            "in a Sequential head",
            "fc, not last",
            "ending",
        ),
        *("in a Sequential beside one", "DiT's", "such in a list's items", "logits"),
    ],
)
def test_names_make_heads_outside_of_repeated_blocks(model, expected):
    assert heads_of(model) == expected


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, lambda m: torch.compile(m, backend="eager")])
def test_wrappers_hide_no_head(wrap):
    wrapped = Tree(body=linear(), lm_head=wrap(linear(5)), layers=nn.ModuleList([wrap(Tree(head=linear()))]))
    rows = {row.name: row.algorithm for row in route(wrapped, None)[1]}
    assert rows == {"body.weight": "muon", "lm_head.weight": "adamw", "layers.0.head.weight": "muon"}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Tree(e=nn.Embedding(5, 3), body=linear(), last=linear(5)), {"last": BY_SHAPE}),
        (nn.Sequential(nn.Embedding(5, 3), linear(), linear(5)), {"2": BY_SHAPE}),
        (Tree(e=nn.Embedding(5, 3), last=linear(5), body=linear()), {}),
        (Tree(e=nn.Embedding(5, 3), one=linear(5), last=linear(5)), {}),
        (Tree(e=nn.Embedding(5, 3), layers=nn.ModuleList([linear(5)])), {}),
        (Tree(tokens=nn.Embedding(5, 3), types=nn.Embedding(2, 3), last=linear(2)), {}),
        (Tree(e=nn.Embedding(5, 3), head=linear(), last=linear(5)), {"head": "by its name 'head'"}),
    ],
    ids=[
        "shape",
        "in a Sequential",
        "not last",
        "not alone",
        "in a list",
        "a smaller embedding's",
        "name before shape",
    ],
)
def test_the_shape_of_the_largest_embedding_makes_the_last_one_a_head(model, expected):
    assert heads_of(model) == expected


class Classifies(Tree):
    def get_classifier(self) -> nn.Module:
        return self.decoder


@pytest.mark.parametrize("another", [False, True])
@pytest.mark.parametrize("name", ["lm_head", "policy_head", "proj", "fc", "sized", "decoder"])
def test_a_copy_that_peft_trains_in_place_of_a_head_is_the_head(name, another):
    head = nn.Sequential(linear(), linear(5, 4)) if name in ("policy_head", "decoder") else linear(5)
    parts: dict[str, nn.Module] = {"e": nn.Embedding(5, 3)} if name == "proj" else {}
    model = (Classifies if name == "decoder" else Tree)(layers=blocks(up=linear()), **parts, **{name: head})
    if name == "sized":
        model.num_classes = 5
    ((path, why),) = heads_of(model).items()
    config = LoraConfig(r=2, target_modules=["up"], modules_to_save=[name])
    adapted = get_peft_model(model, config)
    if another:
        adapted.add_adapter("reference", config)  # frozen
    assert heads_of(adapted) == {path.replace(name, f"base_model.model.{name}.modules_to_save.default"): why}


def test_no_weight_is_computed_to_find_heads():
    layer = nn.utils.parametrizations.spectral_norm(linear())  # which changes at each use
    before = layer.parametrizations.weight[0]._u.clone()
    assert heads_of(Tree(num_classes=4, head=layer)) == {}
    assert torch.equal(before, layer.parametrizations.weight[0]._u)
