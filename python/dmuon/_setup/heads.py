"""Finds the projections that are a model's output heads, which AdamW updates."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch
import torch.nn as nn

from dmuon._setup.place import clean_name

# Names of heads outside of repeated blocks. Inside of a block they mean nothing.
_NAMES = {"lm_head", "head", "output", "output_layer", "unembed", "embed_out", "classifier", "score", "logits"}
_NAMES |= {"proj_out", "proj_out_2", "qa_outputs", "action_out_proj"}  # the second one is DiT's, the last one pi0's
_ENDINGS = ("_head", "_classifier")
_METHODS = ("get_output_embeddings", "get_classifier")  # of Transformers, of timm
_SIZES = ("num_labels", "num_classes")


def find_heads(model: nn.Module, embeddings: Collection[nn.Parameter]) -> dict[int, str]:
    """Returns the ids of the heads' parameters, each with the reason.

    Args:
        model: a model as it was built, or with wrappers around its modules.
        embeddings: the weights of the model's embeddings.
    """
    outside = list(_outside_blocks("", model, set()))
    projections = _projections(outside)
    heads: dict[int, str] = {}
    for size, weight in _by_size(outside, projections):
        heads[id(weight)] = f"output head, by its rows: {size}"
    for path, weight in _by_name(outside):
        heads[id(weight)] = f"output head, by its name '{path}'"
    for _, module in outside:
        for method in _METHODS:
            heads.update((id(weight), f"output head, by {method}()") for weight in _said(module, method))
    for weight in embeddings:  # some models return these
        heads.pop(id(weight), None)
    return heads or _last_in_a_head(outside, projections) or _by_shape(model, projections, embeddings)


def _projections(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, torch.Tensor]]:
    """Returns path and weight of the linear layers. Skips layers that compute their weight at every access."""
    weights = ((path, m._parameters.get("weight")) for path, m in modules if isinstance(m, nn.Linear))
    return [(path, weight) for path, weight in weights if weight is not None and weight.ndim == 2]


def _named_as_head(path: str) -> bool:
    name = clean_name(path).rpartition(".")[2].lower()
    return name in _NAMES or (name.endswith(_ENDINGS) and not name.startswith("pre_"))


def _outside_blocks(path: str, module: nn.Module, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields named_modules() without the items of module lists and without items of a Sequential that are alike."""
    if module in seen or isinstance(module, nn.ModuleList):
        return
    seen.add(module)
    yield path, module
    children = list(module.named_children())
    for name, child in children:
        alike = [type(other) for _, other in children].count(type(child)) > 1
        if not (isinstance(module, nn.Sequential) and alike and any(True for _ in child.children())):
            yield from _outside_blocks(f"{path}.{name}" if path else name, child, seen)


def _said(module: nn.Module, method: str) -> Iterator[torch.Tensor]:
    """Yields the weights that the model's own method returns. A method that fails yields none."""
    found = None
    with contextlib.suppress(Exception):
        found = getattr(module, method)()
    for head in found if isinstance(found, tuple | list) else [found]:
        if not isinstance(head, nn.Module):
            continue
        # A classifier may have hidden layers. A language model's head is one layer, or there are several heads.
        last = [weight for _, weight in _projections(head.named_modules())][-1:]
        yield from last if method == "get_classifier" else head.parameters()


def _by_name(outside: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in outside:
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and _named_as_head(path):
            yield clean_name(path), weight


def _last_in_a_head(
    outside: list[tuple[str, nn.Module]], projections: list[tuple[str, torch.Tensor]]
) -> dict[int, str]:
    """Finds torchvision's heads: the last projection of a Sequential named as a head, or the model's own "fc"."""
    found = [(path, weight) for path, weight in projections[-1:] if clean_name(path) == "fc"]
    for path, module in outside:
        if isinstance(module, nn.Sequential) and _named_as_head(path):
            found += _within(path, projections)[-1:]
    return {id(weight): f"output head, by its name '{clean_name(path)}'" for path, weight in found}


def _within(path: str, projections: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(where, weight) for where, weight in projections if f"{where}.".startswith(f"{path}." if path else "")]


def _by_size(
    outside: list[tuple[str, nn.Module]], projections: list[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Finds the last projection in a module that has as many rows as the module says it has classes.

    Detectors have one row more, for "no object".
    """
    for path, module in outside:
        for holder in (module, getattr(module, "config", None)):
            for name in _SIZES:
                size = getattr(holder, name, None)
                if type(size) is int:
                    fit = [weight for _, weight in _within(path, projections) if weight.shape[0] in (size, size + 1)]
                    yield from ((f"{name} = {size}", weight) for weight in fit[-1:])


def _by_shape(
    model: nn.Module, projections: list[tuple[str, torch.Tensor]], embeddings: Collection[nn.Parameter]
) -> dict[int, str]:
    """Finds the last projection if it alone has the shape of the largest embedding, as hand-written models have it."""
    everywhere = _projections(model.named_modules())
    if not embeddings or not projections:
        return {}
    shape, last = max(embeddings, key=lambda weight: weight.numel()).shape, projections[-1][1]
    if last.shape != shape or last is not everywhere[-1][1] or [w.shape for _, w in everywhere].count(shape) > 1:
        return {}
    return {id(last): "output head, by its shape: the largest embedding's, and no other matrix has it"}
