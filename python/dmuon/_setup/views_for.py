"""The views of known Transformers models: heads, and projections that share a parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from dmuon import views
from dmuon._setup.leaf import Leaf
from dmuon._setup.place import Place, clean_name
from dmuon._setup.shown import listed
from dmuon.views import View

_PACKAGE = "transformers.models."
_MOST_NAMED = 3


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a projection: `height` ones for each of `heads`, or all of them if it has none."""

    label: str
    height: int
    heads: int = 1


@dataclasses.dataclass(frozen=True)
class _Fused:
    """The heads or projections that one parameter of a module holds."""

    parameter: str  # its name in the module
    rows: tuple[_Rows, ...]
    interleaved: bool = False  # True: each head has rows of all projections; all have equally many heads
    stack: int = 1  # experts, of which each has these rows

    def view(self, parameter: torch.Tensor, heads: bool) -> View | Sequence[View]:
        if self.stack > 1 or parameter.ndim == 3:
            return views.gate_up(parameter)
        if self.interleaved:
            return views.interleaved(parameter, [rows.height for rows in self.rows], by_group=heads)
        if heads:
            return views.rows(parameter, [rows.height for rows in self.rows for _ in range(rows.heads)])
        return views.rows(parameter, [rows.height * rows.heads for rows in self.rows])

    def labels(self, heads: bool) -> tuple[str, ...]:
        """Returns the names of the matrices of `view`, in their order."""
        names = [rows.label for rows in self.rows]
        if self.stack > 1:
            return tuple(f"{name}[{expert}]" for expert in range(self.stack) for name in names)
        if not heads:
            return tuple(names)
        if self.interleaved:
            return tuple(f"{name}[{head}]" for head in range(self.rows[0].heads) for name in names)
        return tuple(
            f"{rows.label}[{head}]" if rows.heads > 1 else rows.label
            for rows in self.rows
            for head in range(rows.heads)
        )

    def words(self, heads: bool) -> str:
        by = "expert" if self.stack > 1 else "head" if heads and any(rows.heads > 1 for rows in self.rows) else ""
        return ", ".join(rows.label for rows in self.rows) + (f" by {by}" if by else "")

    def is_split(self, heads: bool) -> bool:
        return len(self.rows) > 1 or (heads and self.rows[0].heads > 1)


def _heads_of(attention: Any) -> tuple[int, int, int]:
    """Returns head_dim, the number of heads of Q, and that of K and V."""
    config = attention.config
    of_q = config.num_attention_heads
    return attention.head_dim, of_q, getattr(config, "num_key_value_heads", None) or of_q


def _separate(attention: Any) -> Iterator[_Fused]:
    size, of_q, of_kv = _heads_of(attention)
    for label, heads in (("q", of_q), ("k", of_kv), ("v", of_kv)):
        yield _Fused(f"{label}_proj.weight", (_Rows(label, size, heads),))


def _phi3(attention: Any) -> Iterator[_Fused]:
    size, of_q, of_kv = _heads_of(attention)
    yield _Fused("qkv_proj.weight", (_Rows("q", size, of_q), _Rows("k", size, of_kv), _Rows("v", size, of_kv)))


def _gpt_neox(attention: Any) -> Iterator[_Fused]:
    size, heads = attention.head_size, attention.config.num_attention_heads
    rows = tuple(_Rows(label, size, heads) for label in "qkv")
    yield _Fused("query_key_value.weight", rows, interleaved=True)


def _latent(attention: Any) -> Iterator[_Fused]:
    """DeepSeek's attention: parts with and without positions, and K and V from one latent vector."""
    config = attention.config
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    q = (_Rows("q_nope", nope, heads), _Rows("q_rope", rope, heads))
    yield _Fused("q_proj.weight" if config.q_lora_rank is None else "q_b_proj.weight", q, interleaved=True)
    yield _Fused("kv_a_proj_with_mqa.weight", (_Rows("kv_latent", config.kv_lora_rank), _Rows("k_rope", rope)))
    kv = (_Rows("k_nope", nope, heads), _Rows("v", config.v_head_dim, heads))
    yield _Fused("kv_b_proj.weight", kv, interleaved=True)


def _gate_up(mlp: Any) -> Iterator[_Fused]:
    size = mlp.config.intermediate_size
    yield _Fused("gate_up_proj.weight", (_Rows("gate", size), _Rows("up", size)))


def _experts(experts: Any) -> Iterator[_Fused]:
    size = experts.intermediate_dim
    rows = (_Rows("gate", size), _Rows("up", size))
    yield _Fused("gate_up_proj", rows, stack=experts.num_experts)


def _torch_attention(attention: Any) -> Iterator[_Fused]:
    size, heads = attention.head_dim, attention.num_heads
    rows = tuple(_Rows(label, size, heads) for label in "qkv")
    yield _Fused("in_proj_weight", rows)


# The classes that hold heads or fused projections, by Transformers' name of their architecture.
_KNOWN: dict[str, dict[str, Callable[[Any], Iterator[_Fused]]]] = {
    "deepseek_v2": {"DeepseekV2Attention": _latent, "DeepseekV2Experts": _experts},
    "deepseek_v3": {"DeepseekV3Attention": _latent, "DeepseekV3Experts": _experts, "DeepseekV3NaiveMoe": _experts},
    "gemma": {"GemmaAttention": _separate},
    "gemma2": {"Gemma2Attention": _separate},
    "gemma3": {"Gemma3Attention": _separate},
    "glm4_moe": {"Glm4MoeAttention": _separate, "Glm4MoeExperts": _experts, "Glm4MoeNaiveMoe": _experts},
    "gpt_neox": {"GPTNeoXAttention": _gpt_neox},
    "granite": {"GraniteAttention": _separate},
    "helium": {"HeliumAttention": _separate},
    "llama": {"LlamaAttention": _separate},
    "mistral": {"MistralAttention": _separate},
    "mixtral": {"MixtralAttention": _separate, "MixtralExperts": _experts},
    "olmo2": {"Olmo2Attention": _separate},
    "paligemma": {},
    "phi": {"PhiAttention": _separate},
    "phi3": {"Phi3Attention": _phi3, "Phi3MLP": _gate_up},
    "qwen2": {"Qwen2Attention": _separate},
    "qwen2_moe": {"Qwen2MoeAttention": _separate, "Qwen2MoeExperts": _experts},
    "qwen3": {"Qwen3Attention": _separate},
    "qwen3_moe": {"Qwen3MoeAttention": _separate, "Qwen3MoeExperts": _experts},
    "siglip": {"SiglipAttention": _separate},
    "smollm3": {"SmolLM3Attention": _separate},
}


def _architecture_of(module: nn.Module) -> tuple[str, type[nn.Module]] | None:
    """Returns Transformers' name of a module's architecture, and its class there. None for other modules."""
    for cls in type(module).__mro__:
        if cls.__module__.startswith(_PACKAGE):
            return cls.__module__.removeprefix(_PACKAGE).partition(".")[0], cls
    return None


class _Split(NamedTuple):
    """A parameter of a model that is split."""

    fused: _Fused
    name: str  # in the model
    of_class: str

    def words(self, heads: bool) -> str:
        return f"{self.fused.words(heads)} of {self.of_class}"


class KnownViews:
    """A `select` for `dedicate_params`: the views of one model's heads and projections. Prints as a table.

    Returns None for parameters that it does not split, which go by the default rule, and for frozen ones.

    Attributes:
        parts: by the name of each parameter that is split, the names of its matrices in the order in which the view
            has them, such as ("q", "k", "v"), or ("q[0]", "q[1]") of two heads.
    """

    def __init__(self, model: nn.Module, heads: bool) -> None:
        self._heads = heads
        self._split: dict[tuple[nn.Module, str], _Split] = {}  # by module and attribute
        for path, module in model.named_modules():
            found = _architecture_of(module)
            describe = _KNOWN[found[0]].get(found[1].__name__) if found else None
            if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
                describe = _torch_attention
            if describe is None:
                continue
            for fused in describe(module):
                if fused.is_split(heads):
                    self._add(path, module, fused, found[1] if found else nn.MultiheadAttention)
        self.parts = {split.name: split.fused.labels(heads) for split in self._split.values()}

    def _add(self, path: str, module: nn.Module, fused: _Fused, cls: type[nn.Module]) -> None:
        parent, _, attribute = fused.parameter.rpartition(".")
        name = clean_name(f"{path}.{fused.parameter}" if path else fused.parameter)
        holder = module.get_submodule(parent)
        if holder._parameters.get(attribute) is None:
            raise ValueError(
                f"views_for: model: expected a parameter '{name}', as of {cls.__name__}; got a "
                f"{type(holder).__name__} without one. Expected: the model as Transformers has built it."
            )
        self._split[holder, attribute] = _Split(fused, name, cls.__name__)

    def __call__(self, name: str, module: nn.Module, parameter: torch.Tensor) -> View | Sequence[View] | None:
        """Returns the views of a parameter, None if it is not split or frozen."""
        split = self._split.get((module, name.rpartition(".")[2]))
        return None if split is None or not parameter.requires_grad else split.fused.view(parameter, self._heads)

    def why(self, place: Place) -> str:
        """Returns what a parameter that is split was taken for, for the routing table."""
        return self._split[place.module, place.attribute].words(self._heads)

    def require_all(self, leaves: Collection[Leaf], function: str) -> None:
        """Checks that a model holds all modules that `views_for` has read.

        Raises:
            ValueError: some are missing, as after a copy. Names `function`.
        """
        held = {(place.module, place.attribute) for leaf in leaves for place in leaf.places}
        missing = [f"'{split.name}'" for key, split in self._split.items() if key not in held]
        if missing:
            raise ValueError(
                f"{function}: select: expected the views of this model; got those of another, or of a copy: "
                f"views_for() has read {listed(missing, _MOST_NAMED)}, whose modules are not in this model."
            )

    def __str__(self) -> str:
        width = max((len(split.name) for split in self._split.values()), default=0)
        rows = [f"{split.name:<{width}}  {split.words(self._heads)}" for split in self._split.values()]
        return "\n".join(rows) or "nothing to split"


def views_for(model: nn.Module, heads: bool = False) -> KnownViews:
    """Returns the views of a Transformers model's heads or projections, for `select` of `dedicate_params`.

        dmuon.dedicate_params(model, mesh, select=dmuon.views_for(model, heads=True))

    Without `heads`, projections that share a parameter are apart: Q, K and V (Phi-3, GPT-NeoX, also interleaved),
    gate and up (Phi-3, stacks of experts), and DeepSeek's parts of latent attention. With `heads`, each head of Q, K
    and V is a matrix of its own besides. Output projections stay whole. The routing table says what was taken for what.

    Args:
        model: of the architectures DeepSeek V2 and V3, Gemma 1 to 3, GLM-4 with experts, GPT-NeoX, Granite, Helium,
            Llama, Mistral, Mixtral, OLMo 2, PaliGemma, Phi 1 to 3, Qwen 2 and 3 with and without experts, SigLIP, and
            SmolLM3, or a module that holds such a model. Before `dedicate_params`, on any device.
        heads: True splits Q, K and V by head.

    Raises:
        ValueError: the model has modules of another architecture of Transformers, or none of these.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"views_for: model: expected an nn.Module, got {type(model).__name__}")
    if type(heads) is not bool:
        raise ValueError(f"views_for: heads: expected True or False, got {heads!r}")
    found = [architecture for module in model.modules() if (architecture := _architecture_of(module))]
    known = ", ".join(sorted(_KNOWN))
    for name, cls in found:
        if name not in _KNOWN:
            raise ValueError(
                f"views_for: model: expected modules of the architectures {known}; got {cls.__name__} of {name}. "
                "Say its views by select or dmuon.views.by_class."
            )
    if not found:
        raise ValueError(
            f"views_for: model: expected a Transformers model of the architectures {known}; got "
            f"{type(model).__name__}, which has no module of them."
        )
    return KnownViews(model, heads)
