"""The default routing: the parameters that Muon updates without `select`."""

from __future__ import annotations

import fnmatch
import re

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from dmuon import views
from dmuon._setup.heads import find_heads
from dmuon._setup.leaf import Leaf
from dmuon._setup.place import Place, clean_name
from dmuon.views import View

_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")  # a word in a snake_case or CamelCase name
_EMBEDDING_WORDS = ("emb", "wte", "wpe")
_NO_EXPERTS = (nn.Conv1d, nn.ConvTranspose1d, nn.Bilinear)  # 3-D for another reason, whatever their names
# The endings that weight_norm, spectral_norm and pruning add to the name of the weight that they compute.
_COMPUTED_FROM = re.compile("(.+)_(g|v|orig)")


# Names of projections that mostly hold several matrices, and the view that takes those apart.
_FUSED = {
    **dict.fromkeys(("qkv", "qkv_proj", "to_qkv", "in_proj_weight", "c_attn"), "qkv"),
    **dict.fromkeys(
        ("wqkv", "query_key_value", "linear_qkv"), "per_head or interleaved, or qkv if all rows of Q come first"
    ),  # torchtitan, GPT-NeoX, Megatron
    **dict.fromkeys(("kv", "wkv", "kv_proj", "to_kv", "kv_a_proj_with_mqa", "in_proj_qkv"), "rows"),
    **dict.fromkeys(("kv_b_proj", "in_proj_qkvz", "in_proj_ba"), "interleaved"),  # DeepSeek, Qwen3-Next
    "in_proj": "rows or interleaved",  # Mamba, DeBERTa
    **dict.fromkeys(("gate_up", "gate_up_proj", "w12", "w13"), "gate_up"),
}
_ADAPTIVE = ("norm", "adaln", "modulation")  # in names of modules that compute scale, shift, gate


class Rules:
    """The rules for one model, equal on all ranks."""

    def __init__(self, model: nn.Module, function: str) -> None:
        """Looks for embeddings and heads.

        Raises:
            ValueError: `dmuon.views.by_class` has a bad entry. Names `function`.
        """
        self._by_class = f"{function}: views.by_class"
        for key, rule in views.by_class.items():
            if not (
                isinstance(key, type | str)
                and isinstance(rule, dict)
                and all(isinstance(name, str) and callable(view_of) for name, view_of in rule.items())
            ):
                raise ValueError(
                    f"{self._by_class}: expected a class of modules, or its qualified name, and a dict that gives "
                    f"names of parameters their view, such as {{'weight': dmuon.views.matrix}}; got {key!r}: {rule!r}"
                )
        embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        weights = (module._parameters.get("weight") for module in embeddings)
        self._embeddings = {id(weight): weight for weight in weights if weight is not None}
        self._heads = find_heads(model, self._embeddings.values())

    def decide(self, entry: Leaf) -> tuple[tuple[View, ...], str, str | None]:
        """Returns a fit parameter's views, none for AdamW; why; and its module's class if no rule knows the class."""
        parameter, place = entry.parameter, entry.places[0]
        if parameter.ndim < 2:
            return (), f"{parameter.ndim}-D", None
        if reason := self._no_matrix(entry):
            return (), reason, None
        found = next((found for place in entry.places if (found := self._views(entry, place))), None)
        if found:
            views, why = found
            return (views, why, None) if all(min(v.sides) > 1 for v in views) else ((), "a side of 1", None)
        if "bias" in place.attribute.lower() and _is_of_experts(place):
            return (), "biases of experts", None
        names = (clean_name(entry.places[-1].path).rpartition(".")[2], place.attribute)
        if parameter.ndim <= 3 and any(_names_embedding(name) for name in names):
            return (), f"embedding, by its name '{entry.name}'", None
        if sorted(parameter.shape)[-2] == 1:
            return (), "a side of 1", None
        unknown = next(c for c in type(place.module).__mro__ if not issubclass(c, FSDPModule))
        dimensions = f" ({parameter.ndim}-D)" if parameter.ndim > 2 else ""
        return (), f"no rule for {unknown.__name__}{dimensions}", qualified_name(unknown)

    def _no_matrix(self, entry: Leaf) -> str | None:
        """Returns a reason why AdamW updates a parameter in a module of any class, or None."""
        if id(entry.parameter) in self._embeddings:
            return "embedding" if len(entry.places) == 1 else "tied to an embedding"
        if any(_is_computed_from(place) for place in entry.places):
            return "a weight is computed from it"
        return self._heads.get(id(entry.parameter))

    def _views(self, entry: Leaf, place: Place) -> tuple[tuple[View, ...], str] | None:
        """Returns the views by the module's class, and why. None if the class has no rule for the parameter."""
        parameter, attribute = entry.parameter, place.attribute
        for cls in type(place.module).__mro__:
            rule = views.by_class.get(cls, views.by_class.get(qualified_name(cls)))
            if rule is None:
                continue
            view_of = next((view_of for name, view_of in rule.items() if fnmatch.fnmatchcase(attribute, name)), None)
            if view_of is None and not rule:
                return (), f"left out in dmuon.views.by_class: {cls.__name__}"
            if view_of is None or (view_of is views.matrix and parameter.ndim != 2):
                break
            asked = f"{self._by_class}[{cls.__name__}][{attribute!r}]"
            try:
                answer = _view_of_conv(place.module, parameter) if view_of is views.conv else view_of(parameter)
            except Exception as error:  # the user's own
                raise ValueError(f"{asked}: raised {type(error).__name__} for '{entry.name}': {error}") from error
            return entry.check_views(answer, asked), f"matrix of {cls.__name__}{_note_of_fused(entry, place, view_of)}"
        if parameter.ndim == 3 and min(parameter.shape[1:]) > 1 and _holds_experts(place):
            note = _note_of_fused(entry, place, views.experts)
            return (views.experts(parameter),), f"a matrix for each expert{note}"
        if parameter.ndim == 2 and attribute == "weight" and type(place.module).__name__.endswith("Router"):
            return (views.matrix(parameter),), "matrix of a router, by its class's name"
        return None


def _note_of_fused(entry: Leaf, place: Place, view_of: object) -> str:
    """Returns words for a parameter that is taken as one matrix, and by its name or place holds several."""
    if view_of not in (views.matrix, views.conv1d, views.experts):
        return ""
    *_, parent, name = ["", *clean_name(place.path).lower().split(".")]
    found = _FUSED.get(place.attribute.lower()) or _FUSED.get(name)
    *_, rows, cols = entry.parameter.shape
    if found is None and any(word in f"{parent}.{name}" for word in _ADAPTIVE) and rows > cols and rows % cols == 0:
        found = "rows"
    if found and view_of is views.conv1d:
        found = "columns"  # stored as [in, out]
    elif found and view_of is views.experts:
        found += " or columns"
    return f"; if it holds several, see dmuon.views.{found}" if found else ""


def _view_of_conv(module: nn.Module, weight: torch.Tensor) -> View:
    """Returns a view with a matrix for each group of a convolution, because groups share no input."""
    if not isinstance(module, _ConvNd):
        return views.conv(weight)
    view = views.conv(weight, module.groups)
    return views.transposed(view) if module.transposed else view


def fitting_entries(model: nn.Module) -> dict[str, bool]:
    """Returns the user's entries of `dmuon.views.by_class`; True if they fit a module and a parameter of it."""
    names: dict[type | str, set[str]] = {}  # names of parameters, by class
    for module in model.modules():
        for cls in type(module).__mro__:
            for key in (cls, qualified_name(cls)):
                names.setdefault(key, set()).update(module._parameters)
    found: dict[str, bool] = {}
    for key, rule in views.by_class.items():
        entry = f"by_class[{key.__name__ if isinstance(key, type) else repr(key)}]"
        default = views._BY_DEFAULT.get(key, {})
        if key not in views._BY_DEFAULT:
            found[entry] = key in names
        for pattern in rule if key in names else ():
            if pattern not in default:
                found[f"{entry}[{pattern!r}]"] = any(fnmatch.fnmatchcase(name, pattern) for name in names[key])
    return found


def qualified_name(cls: type) -> str:
    """Returns the key of a class in tables that name classes without importing them."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_computed_from(place: Place) -> bool:
    """True if the module computes a weight from the parameter there, as weight_norm does from g and v."""
    if isinstance(place.module, ParametrizationList):
        return True
    found = _COMPUTED_FROM.fullmatch(place.attribute)
    return found is not None and found[1] not in place.module._parameters and hasattr(place.module, found[1])


def _is_of_experts(place: Place) -> bool:
    """True if the module's name, or its class's name, is one of experts."""
    names = (type(place.module).__name__, clean_name(place.path).rpartition(".")[2])
    return any("expert" in name.lower() for name in names) and not isinstance(place.module, _NO_EXPERTS)


def _holds_experts(place: Place) -> bool:
    return _is_of_experts(place) and not ("bias" in place.attribute.lower() or _names_embedding(place.attribute))


def _names_embedding(name: str) -> bool:
    """True if a word of the name begins or ends as embeddings' names do: "tok_embs" and "posEmb", not "ensemble"."""
    words = [word.lower().removesuffix("s") for word in _WORD.findall(name)]
    return any(
        "embed" in word or word.startswith(_EMBEDDING_WORDS) or word.endswith(_EMBEDDING_WORDS) for word in words
    )
