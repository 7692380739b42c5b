"""Finds the projections that are a model's output heads, which AdamW updates."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator

import torch
import torch.nn as nn

from dmuon._setup.place import clean_name

# Names of heads outside of repeated blocks. Inside of a block they mean nothing.
_NAMES = {"lm_head", "head", "output", "output_layer", "unembed", "embed_out", "classifier", "score", "logits"}
_NAMES |= {"to_logits", "proj_out", "proj_out_2", "qa_outputs"}
_NAMES |= {"final_layer.linear", "action_out_proj"}  # DiT's and pi0's; proj_out_2 is DiT's in Diffusers
_ENDINGS = ("_head", "_classifier")
_METHODS = ("get_output_embeddings", "get_classifier")  # of Transformers, of timm
_SIZES = ("num_labels", "num_classes")
_OF_PEFT = re.compile(r"^base_model\.model\.|\.modules_to_save\.[^.]+")  # what PEFT adds to paths


def find_heads(model: nn.Module, embeddings: Collection[nn.Parameter]) -> dict[int, str]:
    """Returns the ids of the heads' parameters, each with the reason.

    Args:
        model: a model as it was built, or with wrappers around its modules.
        embeddings: the weights of the model's embeddings.
    """
    originals = _originals(model)
    outside = list(_outside_blocks("", model, set(originals)))
    projections = _projections(outside)
    heads: dict[int, str] = {}
    for size, weight in _by_size(outside, projections):
        heads[id(weight)] = f"output head, by its rows: {size}"
    for path, weight in _by_name(outside, projections):
        heads[id(weight)] = f"output head, by its name '{path}'"
    for _, module in outside:
        for method in _METHODS:
            heads.update((id(weight), f"output head, by {method}()") for weight in _said(module, method))
    for weight in embeddings:  # some models return these
        heads.pop(id(weight), None)
    if not heads:
        named = _last_of_sequentials(outside, projections, named_output=True)
        heads = {id(weight): f"output head, by its name '{path}'" for path, weight in named}
    if heads or not projections:
        return heads
    last = [weight for _, weight in _last(projections)]
    if _plain(projections[-1][0]) == "fc":  # torchvision's
        return {id(weight): "output head, by its name 'fc'" for weight in last}
    everywhere = _projections(model.named_modules(set(originals)))
    return _by_shape(last, [weight for _, weight in everywhere], embeddings)


def _originals(model: nn.Module) -> set[nn.Module]:
    """Returns the frozen modules, with all inside, in whose place PEFT trains copies."""
    return {
        inner
        for wrapper in model.modules()
        if "modules_to_save" in wrapper._modules and (original := wrapper._modules.get("original_module")) is not None
        for inner in original.modules()
    }


def _plain(path: str) -> str:
    """Returns a module's path without wrappers."""
    return _OF_PEFT.sub("", clean_name(path))


def _projections(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, torch.Tensor]]:
    """Returns path and weight of the linear layers. Skips layers that compute their weight at every access."""
    weights = ((path, m._parameters.get("weight")) for path, m in modules if isinstance(m, nn.Linear))
    return [(path, weight) for path, weight in weights if weight is not None and weight.ndim == 2]


def _last(projections: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Returns the last projection; if PEFT has copies of it, for several adapters, all of these."""
    last = _plain(projections[-1][0]) if projections else ""
    return [(path, weight) for path, weight in projections if _plain(path) == last]


def _named_as_head(path: str) -> bool:
    *_, parent, name = ["", *_plain(path).lower().split(".")]
    is_ending = name.endswith(_ENDINGS) and not name.startswith("pre_")
    return is_ending or not _NAMES.isdisjoint((name, f"{parent}.{name}"))


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
        last = (weight for _, weight in _last(_projections(head.named_modules(prefix="head"))))
        yield from last if method == "get_classifier" else head.parameters()


def _by_name(
    outside: list[tuple[str, nn.Module]], projections: list[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Finds modules named as heads; of a Sequential named so, the last projection."""
    for path, module in outside:
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and _named_as_head(path):
            yield _plain(path), weight
    # "output" may also be a part of a hand-written block, outside of a list.
    yield from _last_of_sequentials(outside, projections, named_output=False)


def _last_of_sequentials(
    outside: list[tuple[str, nn.Module]], projections: list[tuple[str, torch.Tensor]], named_output: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the last projection of each Sequential called "output", or of those with other names of heads."""
    for path, module in outside:
        is_output = _plain(path).rpartition(".")[2].lower() == "output"
        if isinstance(module, nn.Sequential) and _named_as_head(path) and is_output == named_output:
            yield from ((_plain(where), last) for where, last in _last(_within(path, projections)))


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
                    fit = [one for one in _within(path, projections) if one[1].shape[0] in (size, size + 1)]
                    yield from ((f"{name} = {size}", weight) for _, weight in _last(fit))


def _by_shape(
    last: list[torch.Tensor], everywhere: list[torch.Tensor], embeddings: Collection[nn.Parameter]
) -> dict[int, str]:
    """Finds the last projection if it alone has the shape of the largest embedding, as hand-written models have it."""
    if not embeddings or last[-1] is not everywhere[-1]:
        return {}
    shape = max(embeddings, key=lambda weight: weight.numel()).shape
    if last[-1].shape != shape or [weight.shape for weight in everywhere].count(shape) > len(last):
        return {}
    why = "output head, by its shape: the largest embedding's, and no other matrix has it"
    return {id(weight): why for weight in last}
